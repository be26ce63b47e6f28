"""How the table kernels deal their work, in Triton's interpreter: any number of programs, the same result.

The tests below run in a process of their own, which the last one starts.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import index_cases
import pytest
import torch
import triton
import triton.language as tl
from index_check import check

from opgraft_triton_kernels.attention import _row_parts as row_parts
from opgraft_triton_kernels.launcher import Launcher

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run in the interpreter by the last test")

NAMES = ("csr_kv_indices", "block_table", "prefill_aware_page_table")
MODULES = {name: importlib.import_module(f"opgraft_triton_kernels.attention._{name}") for name in NAMES}
SMALL = 128

every_op = pytest.mark.parametrize("name", NAMES)
# The most parts that each get a program of their own, and how many programs share them beyond that.
every_plan = pytest.mark.parametrize("plan", [(2100, 1031), (0, 1), (0, 3), (0, 31)], ids=str)


def use(plan, monkeypatch):
    """Deal by this plan, and parts so small that short rows have many."""
    monkeypatch.setattr(row_parts, "_MOST_PROGRAMS", plan[0])
    monkeypatch.setattr(row_parts, "_PROGRAMS", plan[1])
    for name, module in MODULES.items():
        small = Launcher(getattr(module, f"{name}_kernel"), PART=SMALL, HAND=8, num_warps=4)
        monkeypatch.setattr(module, "_PART", SMALL)
        monkeypatch.setattr(module, "kernel", small)


def kernel(name):
    return getattr(MODULES[name], name)


def same_as_native(name, arguments):
    copies = [
        {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
        for _ in range(2)
    ]
    expected = index_cases.OPS[name].forward_native(**copies[0])
    actual = kernel(name)(**copies[1])
    pairs = zip(expected, actual, strict=True) if isinstance(expected, tuple) else [(expected, actual)]
    for one, other in pairs:
        assert torch.equal(one, other)


def is_large(arguments):
    return any(value.numel() > 10_000 for value in arguments.values() if isinstance(value, torch.Tensor))


def long_rows(name, lengths, columns, dtype=torch.int32, **options):
    """Rows of several parts, over a table whose entries are all different."""
    generator = torch.Generator().manual_seed(len(lengths))
    pool = 4
    table = torch.arange(pool * columns, dtype=dtype).view(pool, columns)
    requests = torch.randint(-1, pool + 1, (len(lengths),), generator=generator)
    lens = torch.tensor(lengths)
    arguments = {"req_to_token": table, "req_pool_indices": requests}
    if name == "csr_kv_indices":
        indptr = torch.nn.functional.pad(lens.clamp(min=0).cumsum(0) + 3, (1, 0), value=3)
        out = torch.full((int(indptr[-1]) + 5,), index_cases.CANARY, dtype=torch.int32)
        return {**arguments, "kv_lens": lens, "kv_indptr": indptr, "out": out, **options}
    if name == "block_table":
        return {**arguments, "kv_lens": lens, "page_size": 1, "max_pages": columns, **options}
    prompts = torch.randint(0, columns, (pool,), generator=generator)
    return {**arguments, "seq_lens": lens, "prefill_lens": prompts, "window": 217, "max_kv": columns, **options}


@triton.jit
def note_deal(owners_ptr, counts_ptr, batch, parts, dealers, turns, bits, HAND: tl.constexpr):  # noqa: N803
    """Note for every part of every row which program it was dealt to, and how often it was dealt."""
    own = tl.program_id(0) >= dealers
    for turn in range(0, tl.where(own, 1, turns), HAND):
        row, part, there = row_parts.dealt(turn + tl.arange(0, HAND), batch, parts, dealers, bits, False)
        place = row * parts + part
        tl.store(owners_ptr + place, tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), mask=there)
        tl.atomic_add(counts_ptr + place, 1, mask=there)


def dealt(batch, width, part):
    grid, parts, dealers, turns, bits = row_parts.deal(batch, width, part)
    owners, counts = torch.zeros(2, batch, parts, dtype=torch.int32)
    note_deal[grid](owners, counts, batch, parts, dealers, turns, bits, HAND=8)
    return owners, counts


@interpreted
@every_plan
@pytest.mark.parametrize("batch", [1, 17, 100])
@pytest.mark.parametrize("width", [0, 17, 700])
def test_every_part_of_every_row_is_dealt_once(batch, width, plan, monkeypatch):
    use(plan, monkeypatch)
    _, counts = dealt(batch, width, 16)
    assert counts.shape == (batch, max(-(-width // 16), 1))
    assert (counts == 1).all()


@pytest.mark.parametrize(("batch", "width"), [(1, 2**30), (8, 2**22), (256, 131072), (300, 2**20), (4096, 4096)])
def test_the_programs_for_a_wide_batch_stay_few(batch, width):
    (programs, groups, _), _, dealers, turns, bits = row_parts.deal(batch, width, 1024)
    assert dealers + (1 << bits) == programs
    assert 700 < groups * dealers <= 2100
    assert batch <= groups << bits < batch + (1 << bits)
    assert groups * dealers * turns < 2 * batch * width // 1024


@interpreted
def test_what_is_there_is_dealt_evenly():
    owners, _ = dealt(256, 131072, 1024)
    for row in (0, 1, 100, 255):  # one long row
        assert len(owners[row].unique()) == 128
    for length in (2, 4, 32):  # rows of one length, whose first parts have programs of their own
        shares = owners[:, 1:length].unique(return_counts=True)[1]
        assert shares.max() <= 256 * (length - 1) / 1016 + 1


@interpreted
@every_op
@every_plan
def test_any_number_of_programs_gives_the_same(name, plan, monkeypatch):
    use(plan, monkeypatch)
    for lengths in ([700], [0, 400, -1, 128, 129, 7], [9] * 10 + [699] + [9] * 10):
        same_as_native(name, long_rows(name, lengths, 700))
    same_as_native(name, long_rows(name, lengths, 403, torch.int64))


@interpreted
@every_plan
def test_a_run_longer_than_the_table_is_wide_ends_in_absent_slots(plan, monkeypatch):
    use(plan, monkeypatch)
    for columns in (90, 250):
        arguments = long_rows("csr_kv_indices", [900, 3, 300, 125], columns)
        same_as_native("csr_kv_indices", arguments)
        starts = torch.tensor([-750, 5, columns, 2**40])
        same_as_native("csr_kv_indices", {**arguments, "kv_starts": starts})


@interpreted
@every_plan
def test_runs_may_come_in_any_order(plan, monkeypatch):
    use(plan, monkeypatch)
    arguments = long_rows("csr_kv_indices", [190, 20, 310, 0, 1], 400)
    arguments["kv_indptr"] = torch.tensor([325, 520, 5, 17, 4, 0])
    arguments["out"] = torch.full((540,), index_cases.CANARY, dtype=torch.int64)
    same_as_native("csr_kv_indices", arguments)


@interpreted
@every_plan
@pytest.mark.parametrize("tail", [None, 0, -5])
def test_a_filled_tail_reaches_every_column(plan, tail, monkeypatch):
    use(plan, monkeypatch)
    out = torch.full((3, 300), index_cases.CANARY, dtype=torch.int32)
    arguments = {**long_rows("block_table", [260, 0, 700], 350), "tail": tail, "out": out}
    del arguments["max_pages"]
    same_as_native("block_table", arguments)


@interpreted
@every_plan
@pytest.mark.parametrize("columns", [127, 190, 256])
def test_a_narrow_table_keeps_the_prompt_and_the_end_of_the_window(plan, columns, monkeypatch):
    use(plan, monkeypatch)
    out = torch.full((6, columns + 3), index_cases.CANARY, dtype=torch.int32)[:, 1:-2]
    out_lens = torch.full((12,), index_cases.CANARY, dtype=torch.int32)[::2]
    arguments = long_rows("prefill_aware_page_table", [1100, 375, 128, 0, 257, 625], 512)
    arguments |= {"prefill_lens": torch.tensor([13, 128, 325, 500]), "max_kv": columns}
    same_as_native("prefill_aware_page_table", {**arguments, "out": out, "out_lens": out_lens})
    same_as_native("prefill_aware_page_table", arguments)


@interpreted
@every_op
def test_positions_are_counted_in_64_bit_where_32_do_not_reach(name, monkeypatch):
    monkeypatch.setattr(MODULES[name], "REACH", 0)
    dtypes = next(iter(index_cases.dtype_mixes(name)))
    for _, arguments in index_cases.edge_cases(name, dtypes):
        if not is_large(arguments):
            check(kernel(name), name, arguments)
    for seed in range(20):
        check(kernel(name), name, index_cases.random_case(name, seed))


@interpreted
@every_op
def test_the_hand_is_right_on_random_cases_too(name, monkeypatch):
    use((0, 1), monkeypatch)
    for seed in range(30):
        check(kernel(name), name, index_cases.random_case(name, seed))


@interpreted
@every_op
def test_no_read_and_no_write_leaves_an_allocation(name):
    from fenced_memory import fenced

    dtypes = next(iter(index_cases.dtype_mixes(name)))
    for _, arguments in index_cases.edge_cases(name, dtypes):
        if is_large(arguments):
            continue
        for at_end in (True, False):
            behind = {
                key: fenced(value, at_end=at_end) if isinstance(value, torch.Tensor) else value
                for key, value in arguments.items()
            }
            kernel(name)(**behind)


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.timeout(1500)
def test_all_of_it_passes_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    assert " passed" in done.stdout
