"""Acme's pretend device: a torch device whose memory is not torch's. None of this needs opgraft."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from opgraft_acme.pretend_device import autoload
from opgraft_acme.pretend_device.memory import Memory, memory

autoload()

ACME = torch.device("acme", 0)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        check=False,
        env=os.environ | environment,
        text=True,
    )


def test_a_tensor_on_acme_is_a_plain_tensor_on_acme_0():
    tensor = torch.tensor([1, 2], device="acme")

    assert torch.Tensor is type(tensor)
    assert torch.Tensor is type(tensor[:1])
    assert ACME == tensor.device
    assert "acme:0" == str(tensor.device)
    assert (False, False, True) == (tensor.is_cpu, tensor.is_meta, tensor.is_acme)
    assert "tensor([1, 2], device='acme:0')" == repr(tensor)


def test_tensors_move_there_and_back_by_copy():
    host = torch.tensor([5, 0, -3])

    there = host.to("acme:0")
    host.fill_(9)
    back = there.cpu()
    there.fill_(7)

    assert [5, 0, -3] == back.tolist()
    assert [7, 7, 7] == there.tolist()
    assert there is there.to("acme")


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.complex64,
    ],
)
def test_every_dtype_survives_the_round_trip(dtype):
    host = torch.tensor([0, 1, 3]).to(dtype)

    assert torch.equal(host, host.to("acme").cpu())
    assert dtype is torch.empty(2, dtype=dtype, device="acme").dtype


def test_a_copy_between_acme_tensors_casts():
    source = torch.tensor([2**31 - 1, -1], dtype=torch.int32, device="acme")

    wide = torch.zeros(2, dtype=torch.int64, device="acme").copy_(source)

    assert [2**31 - 1, -1] == wide.tolist()
    assert torch.float32 is source.to(torch.float32).dtype
    assert ACME == source.to(torch.float32).device


VIEWS = {
    "step": lambda t: t[::2],
    "offset": lambda t: t[3:],
    "empty": lambda t: t[:0],
    "expanded": lambda t: t[1:2].expand(5),
    "transposed": lambda t: t.view(3, 4).t(),
    "column": lambda t: t.view(3, 4)[:, 1],
    "selected": lambda t: t[4],
    "unfolded": lambda t: t.unfold(0, 4, 3),
    "reshaped": lambda t: t.view(3, 4).t().reshape(12),
    "of another dtype": lambda t: t.view(torch.int16),
    "split": lambda t: t.split(5)[1],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_what_it_is_on_the_cpu(name):
    host = torch.arange(12, dtype=torch.int32)
    view, expected = VIEWS[name](host.to("acme")), VIEWS[name](host)

    assert expected.tolist() == view.tolist()
    assert expected.stride() == view.stride()
    assert expected.storage_offset() == view.storage_offset()


def test_a_view_shares_the_memory_of_its_tensor():
    tensor = torch.zeros(6, dtype=torch.int64, device="acme")

    tensor[1::2].fill_(4)
    tensor.view(2, 3).t()[0, 1] = 8

    assert [0, 4, 0, 8, 0, 4] == tensor.tolist()


def test_torch_refuses_a_view_beyond_the_storage():
    tensor = torch.zeros(4, device="acme")

    with pytest.raises(RuntimeError, match="out of bounds for storage of size 16"):
        tensor.as_strided((5,), (1,))


def test_the_memory_is_the_cards_own_and_goes_with_the_last_view():
    gc.collect()
    before = torch.acme.memory_allocated()

    tensor = torch.zeros(1000, dtype=torch.int64, device="acme")
    address = tensor.data_ptr()
    view = tensor[10:12]
    del tensor
    gc.collect()

    assert before + 8000 == torch.acme.memory_allocated()
    assert address + 80 == view.data_ptr()
    assert [0, 0] == view.tolist()
    assert bytes(16) == memory.window(address, 80, 16)

    del view
    gc.collect()

    assert before == torch.acme.memory_allocated()
    with pytest.raises(ValueError, match=f"acme: no memory is allocated at {address:#x}"):
        memory.window(address, 0, 1)


def test_an_address_is_never_given_out_twice():
    card = Memory()

    first = card.allocate(1)
    card.free(first)
    second = card.allocate(1)

    assert first != second
    assert 0 == card.allocate(0)
    assert b"\xac" == card.window(second, 0, 1)


def test_a_window_stays_inside_its_block():
    card = Memory()
    address = card.allocate(8)

    message = f"acme: bytes [4..9) leave the 8 bytes at {address:#x}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        card.window(address, 4, 5)


def test_the_host_carries_out_what_the_card_does_not():
    tensor = torch.tensor([5, 0, -3, 7], dtype=torch.int32, device="acme")
    index = torch.tensor([3, 0], device="acme")

    assert [4, 0, 0, 6] == tensor.clamp(min=1).sub(1).tolist()
    assert [5, 5, 2, 9] == tensor.cumsum(0).tolist()
    assert [7, 5] == tensor[index].tolist()
    assert [5, 7] == tensor[tensor > 0].tolist()
    assert [0, 1, 2] == torch.arange(3, device="acme").tolist()
    assert [[5], [-3]] == tensor.view(2, 2).gather(1, torch.zeros_like(index)[:, None]).tolist()
    assert torch.equal(tensor, tensor.clone())
    assert ACME == tensor.cumsum(0).device


EXPRESSIONS = {
    "a number in place of a tensor": lambda t, f: t % 2,
    "a number before the tensor": lambda t, f: 7 % t.clamp(min=1),
    "a float keeps its precision": lambda t, f: f * 0.1,
    "an int tensor takes the default float": lambda t, f: t * 0.5,
    "shift": lambda t, f: t >> 1,
    "in place with a number": lambda t, f: t.remainder_(3),
    "where with a number": lambda t, f: torch.where(t > 1, t, 0),
    "masked assignment": lambda t, f: t.masked_fill_(t > 3, 4),
    "index assignment": lambda t, f: t.index_fill(0, torch.arange(2, device=t.device), 3),
    "several results": lambda t, f: t.sort(),
    "a result whose size is read from values": lambda t, f: t.nonzero(),
    "repeat": lambda t, f: torch.repeat_interleave(t.clamp(min=0)),
    "search": lambda t, f: torch.searchsorted(t.sort()[0], t),
    "pad": lambda t, f: torch.nn.functional.pad(t, (1, 0)),
    "a list of tensors": lambda t, f: torch.cat([t, t[:1]]),
    "matrix product": lambda t, f: f @ f,
    "reduction": lambda t, f: t.view(2, 2).sum(1),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_the_hosts_result_is_the_cpus(name):
    t, f = torch.tensor([5, 0, -3, 7], dtype=torch.int32), torch.tensor([1.5, -2], dtype=float)
    there = t.to("acme"), f.to("acme")

    expected = tree_leaves(EXPRESSIONS[name](t, f))
    results = tree_leaves(EXPRESSIONS[name](*there))

    assert [tensor.dtype for tensor in expected] == [tensor.dtype for tensor in results]
    assert [tensor.tolist() for tensor in expected] == [tensor.tolist() for tensor in results]
    assert {ACME} == {tensor.device for tensor in results}


def test_an_operator_in_place_or_with_out_writes_the_cards_memory():
    tensor = torch.tensor([1, 2], device="acme")
    out, empty = torch.zeros(4, device="acme").long(), torch.empty(0, device="acme").long()

    assert tensor is tensor.add_(1)
    torch.sub(tensor, 1, out=out[::2])
    torch.mul(tensor, 2, out=empty)

    assert [2, 3] == tensor.tolist()
    assert [1, 0, 2, 0] == out.tolist()
    assert [4, 6] == empty.tolist()


def test_resize_keeps_what_was_there():
    tensor = torch.tensor([1, 2], device="acme")

    tensor.resize_(5)

    assert [1, 2] == tensor[:2].tolist()
    assert (5,) == tensor.shape


def test_set_shares_the_memory_of_the_other_tensor():
    tensor, other = torch.empty(0, device="acme").long(), torch.tensor([1, 2], device="acme")

    tensor.set_(other)
    other.fill_(3)

    assert [3, 3] == tensor.tolist()


def test_gradients_flow():
    tensor = torch.tensor([3.0, -1.0], device="acme", requires_grad=True)

    (tensor * tensor).sum().backward()

    assert [6.0, -2.0] == tensor.grad.tolist()
    assert ACME == tensor.grad.device


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("device", ["cpu", "acme"])
def test_checkpointing_works_with_the_device_loaded(device, reentrant):
    x = torch.ones(3, device=device).requires_grad_()
    checkpoint(lambda y: y * 2, x, use_reentrant=reentrant).sum().backward()
    assert [2, 2, 2] == x.grad.tolist()


def test_a_module_moves_to_acme():
    module = torch.nn.Linear(2, 3).to("acme")

    result = module(torch.ones(1, 2, device="acme"))

    assert ACME == module.weight.device
    assert torch.allclose(result.cpu(), module.cpu()(torch.ones(1, 2)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_runs_on_acme(backend):
    def positions(seq_lens):
        return seq_lens[::2].clamp(min=1).sub(1)

    tensor = torch.tensor([5, 9, 0], device="acme")
    torch._dynamo.reset()

    compiled = torch.compile(positions, backend=backend, fullgraph=True)

    assert [4, 0] == compiled(tensor).tolist()


def test_torch_acme_answers_what_torch_and_opgraft_ask():
    assert torch.acme is torch.get_device_module("acme")
    assert 1 == torch.acme.device_count()
    assert 0 == torch.acme.current_device()
    assert torch.acme.is_available()
    assert torch.acme.is_initialized()
    assert "Acme A1 (pretend)" == torch.acme.get_device_name(0)
    assert (1, 0) == (torch.acme.get_device_properties("acme:0").major, torch.acme.get_device_properties().minor)
    torch.acme.set_device(0)
    torch.acme.synchronize(ACME)


def test_a_seed_repeats_the_random_numbers():
    torch.manual_seed(3)
    first = torch.randn(4, device="acme")
    state = torch.acme.get_rng_state()
    second = torch.randn(4, device="acme")
    torch.acme.set_rng_state(state)

    assert torch.equal(second, torch.randn(4, device="acme"))
    torch.manual_seed(3)
    assert torch.equal(first, torch.randn(4, device="acme"))


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(1, device="acme:1"),
        lambda: torch.zeros(1).to("acme:1"),
        lambda: torch.acme.set_device(1),
        lambda: torch.acme.get_device_name("acme:1"),
    ],
)
def test_there_is_one_device(call):
    with pytest.raises(RuntimeError) as caught:
        call()

    assert "acme: there is one device, acme:0; there is no acme:1" == str(caught.value)


def test_pinned_memory_is_refused():
    with pytest.raises(NotImplementedError) as caught:
        torch.empty(1, device="acme", pin_memory=True)

    assert "acme: tensors are strided and never pinned" == str(caught.value)


def test_a_view_that_the_device_does_not_know_is_refused_not_copied():
    library = torch.library.Library("acme_test", "DEF")
    library.define("look(Tensor(a) tensor) -> Tensor(a)")

    with pytest.raises(NotImplementedError) as caught:
        torch.ops.acme_test.look(torch.zeros(1, device="acme"))

    assert "acme: acme_test.look.default makes a view, which this device does not know" == str(caught.value)


def test_tensors_on_two_devices_are_torchs_error():
    with pytest.raises(RuntimeError, match="at least two devices, acme:0 and cpu"):
        torch.zeros(2, device="acme").add(torch.zeros(2))


def test_the_cards_address_is_no_address_of_the_host():
    code = (
        "import ctypes, torch; from opgraft_acme.pretend_device import autoload; autoload();"
        "ctypes.string_at(torch.zeros(1, device='acme').data_ptr(), 1)"
    )

    assert 0 > run_python(code).returncode


def test_autoload_leaves_another_out_of_tree_device_alone():
    code = """
import logging, torch
logging.basicConfig(format="%(levelname)s %(message)s")
torch.utils.rename_privateuse1_backend("other")
from opgraft_acme.pretend_device import autoload
autoload()
print(torch.device("other").type)
"""
    done = run_python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")

    assert "other\n" == done.stdout
    assert (
        "WARNING opgraft-acme: there is no acme device: torch's place for out-of-tree devices is taken by 'other'\n"
    ) == done.stderr
