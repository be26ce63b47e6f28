"""Hold one call of an index op against the model.

`check` looks at everything a call does: values, dtypes, shapes and strides of the results, the
surroundings of every destination, which object is returned, and that no input changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import model_index_ops as model
import torch
from index_cases import BUFFERS, CANARY, DTYPES, OPS, Arguments


class Rows:
    """A table that is too large for lists, read entry by entry."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return self.tensor.shape[0]

    def __getitem__(self, index: int) -> Any:
        part = self.tensor[index]
        return Rows(part) if part.dim() else int(part)


def plain(value: Any) -> Any:
    """Turn tensors into what the model takes."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.tolist() if value.numel() < 2**20 else Rows(value)


# ------------------------------------------------------------------------------ what the model says

POSITIONAL = {
    "clamp_position": ("seq_lens",),
    "csr_kv_indices": ("req_to_token", "req_pool_indices", "kv_lens", "kv_indptr", "kv_starts"),
    "block_table": ("req_to_token", "req_pool_indices", "kv_lens", "kv_starts"),
    "prefill_aware_page_table": ("req_to_token", "req_pool_indices", "seq_lens", "prefill_lens"),
    "seqlens_expand": ("q_lens", "kv_lens"),
    "compact_valid_indices": ("indices", "indptr"),
    "topk_to_slots": ("table", "topk"),
    "topk_valid_length": ("topk",),
    "topk_to_slots_dcp": ("slots",),
    "extend_positions": ("prefix_lens", "extend_lens"),
    "cp_interleave_split": ("extend_lens",),
}
KEEPS_WHAT_IS_THERE = {
    "csr_kv_indices",
    "block_table",
    "prefill_aware_page_table",
    "compact_valid_indices",
    "extend_positions",
}


def expected_outputs(name: str, arguments: Arguments) -> tuple[Any, ...]:
    """What the model says, as nested lists, one per output."""
    values = {key: plain(value) for key, value in arguments.items() if key != "out_lens"}
    out = values.pop("out", None)
    positional = [values.pop(key, None) for key in POSITIONAL[name]]
    if name in KEEPS_WHAT_IS_THERE:
        values["out"] = out
    if name == "csr_kv_indices" and out is not None:
        values["bits"] = torch.iinfo(arguments["out"].dtype).bits
    outputs = getattr(model, name)(*positional, **values)
    if name == "topk_valid_length":
        return outputs[:1]
    if name == "topk_to_slots":
        # A selection without rows has lost its width on the way to lists.
        empty = [model.ABSENT] * arguments["topk"].shape[1]
        return ([row or empty for row in outputs],)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def expected_inputs(name: str, arguments: Arguments) -> dict[str, Any]:
    """What the inputs hold afterwards: themselves, but for the one op that repairs."""
    after = {
        key: value.clone()
        for key, value in arguments.items()
        if isinstance(value, torch.Tensor) and key not in BUFFERS and value.numel() < 2**28
    }
    if name == "topk_valid_length" and arguments.get("repair"):
        topk = arguments["topk"]
        _, repaired = model.topk_valid_length(topk.tolist(), repair=True)
        after["topk"] = torch.tensor(repaired, dtype=topk.dtype).view(topk.shape)
    return after


def _csr_shape(a: Arguments) -> tuple[int, ...]:
    return (a["total"] if "total" in a else max(int(a["kv_indptr"][-1]), 0),)


def _batch_by(a: Arguments, columns: str) -> tuple[int, ...]:
    return a["req_pool_indices"].shape[0], a.get(columns, 0)


FRESH_SHAPES: dict[str, Callable[[Arguments], tuple[tuple[int, ...], ...]]] = {
    "clamp_position": lambda a: (tuple(a["seq_lens"].shape),),
    "csr_kv_indices": lambda a: (_csr_shape(a),),
    "block_table": lambda a: (_batch_by(a, "max_pages"),),
    "prefill_aware_page_table": lambda a: (_batch_by(a, "max_kv"), tuple(a["seq_lens"].shape)),
    "seqlens_expand": lambda a: ((a["total"],),),
    "compact_valid_indices": lambda a: ((a["indices"].shape[0] + 1,), (a["indices"].numel(),)),
    "topk_to_slots": lambda a: ((a.get("output_rows", a["topk"].shape[0]), a["topk"].shape[1]),),
    "topk_valid_length": lambda a: (tuple(a["topk"].shape[:1]),),
    "topk_to_slots_dcp": lambda a: (tuple(a["slots"].shape), tuple(a["slots"].shape[:1])),
    "extend_positions": lambda a: ((a["total"],),),
    "cp_interleave_split": lambda a: (tuple(a["extend_lens"].shape),) * 2,
}


def declared_dtype(name: str, index: int, arguments: Arguments) -> torch.dtype:
    declared = OPS[name].format_signature.output_dtype
    word = declared[index] if isinstance(declared, tuple) else declared
    if word.startswith("like:"):
        return arguments[word.removeprefix("like:")].dtype
    return DTYPES[word]


# ------------------------------------------------------------------------------------- destinations


def guarded(buffer: torch.Tensor, layout: str) -> tuple[torch.Tensor, Callable[[], None]]:
    """Give a buffer of the same content inside canaries, and a check that these are untouched."""
    shape = buffer.shape
    room = [size + 5 for size in shape]
    place = [slice(2, 2 + size) for size in shape]
    if layout == "strided":
        room[0] = 2 * shape[0] + 5
        place[0] = slice(3, 3 + 2 * shape[0], 2)
    turned = layout == "transposed" and buffer.dim() == 2
    storage = torch.full(room[::-1] if turned else room, CANARY + 1, dtype=buffer.dtype)
    hidden = torch.ones_like(storage, dtype=torch.bool)
    view = (storage.t() if turned else storage)[tuple(place)]
    (hidden.t() if turned else hidden)[tuple(place)] = False
    assert shape == view.shape
    view.copy_(buffer)

    def untouched() -> None:
        assert bool((storage[hidden] == CANARY + 1).all()), "written beside the destination"

    return view, untouched


# -------------------------------------------------------------------------------------------- check


def check(call: Callable[..., Any], name: str, arguments: Arguments, *, layout: str = "contiguous") -> None:
    """Run one call and hold everything about it against the model."""
    outputs = expected_outputs(name, arguments)
    inputs = expected_inputs(name, arguments)
    shapes = FRESH_SHAPES[name](arguments)
    writes: Mapping[str, int] = OPS[name].writes
    given = dict(arguments)
    untouched = []
    # The one input that may be written to lies between canaries as destinations do.
    for key in (*writes, *OPS[name].mutates):
        if given.get(key) is not None:
            # A block table is written to in rows of unit stride, or refused.
            kept = layout == "transposed" and name == "block_table"
            given[key], one = guarded(given[key], "sliced" if kept else layout)
            untouched.append(one)
    result = call(**given)
    results = result if isinstance(result, tuple) else (result,)
    assert len(outputs) == len(results)
    buffers = {index: key for key, index in writes.items() if given.get(key) is not None}
    for index, (output, got) in enumerate(zip(outputs, results, strict=True)):
        if index in buffers:
            assert got is given[buffers[index]], f"{buffers[index]} itself is returned"
        else:
            assert shapes[index] == tuple(got.shape)
            assert got.is_contiguous()
            assert declared_dtype(name, index, arguments) == got.dtype
            for key, value in given.items():
                if isinstance(value, torch.Tensor):
                    assert not torch._C._is_alias_of(value, got), f"result {index} aliases {key}"
        assert output == got.tolist()
    for key, value in inputs.items():
        assert torch.equal(value, given[key]), f"{key} changed"
    for one in untouched:
        one()
