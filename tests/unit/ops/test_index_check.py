"""The check of the index ops finds what is wrong: each fault below must fail it."""

from __future__ import annotations

import pytest
import torch
from index_check import check

from opgraft.ops import attention

LENGTHS = torch.tensor([5, 0, 9], dtype=torch.int32)
SELECTION = torch.tensor([[3, -1], [-1, -1]], dtype=torch.int32)


def right(seq_lens, *, out=None):
    return attention.clamp_position.op.forward_native(seq_lens, out=out)


def off_by_one(seq_lens, *, out=None):
    return right(seq_lens + 1, out=out)


def narrow(seq_lens, *, out=None):
    return right(seq_lens, out=out).to(torch.int32)


def strided(seq_lens, *, out=None):
    return right(seq_lens).repeat_interleave(2)[::2]


def too_long(seq_lens, *, out=None):
    return torch.cat((right(seq_lens), torch.zeros(1, dtype=torch.int64)))


def alias(seq_lens, *, out=None):
    return seq_lens.copy_(right(seq_lens))


def another_object(seq_lens, *, out=None):
    return out.copy_(right(seq_lens)).view(-1)


def spills_over(seq_lens, *, out=None):
    out.as_strided((out.shape[0] + 1,), out.stride())[-1] = 0
    return right(seq_lens, out=out)


def changes_its_input(topk, *, rule="last", minimum=1, repair=False):
    lengths = attention.topk_valid_length.op.forward_native(topk, rule=rule, minimum=minimum)
    topk[1, 0] = 0
    return lengths


def forgets_to_repair(topk, *, rule="last", minimum=1, repair=False):
    return attention.topk_valid_length.op.forward_native(topk, rule=rule, minimum=minimum)


@pytest.mark.parametrize("fault", [off_by_one, narrow, strided, too_long])
def test_a_wrong_fresh_result_is_found(fault):
    check(right, "clamp_position", {"seq_lens": LENGTHS})
    with pytest.raises(AssertionError):
        check(fault, "clamp_position", {"seq_lens": LENGTHS})


def test_a_result_that_is_its_input_is_found():
    with pytest.raises(AssertionError, match="aliases seq_lens"):
        check(alias, "clamp_position", {"seq_lens": LENGTHS.to(torch.int64)})


@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize(
    ("fault", "reason"), [(another_object, "out itself is returned"), (spills_over, "written beside the destination")]
)
def test_a_wrong_use_of_a_buffer_is_found(fault, reason, layout):
    arguments = {"seq_lens": LENGTHS, "out": torch.full((3,), -77)}
    check(right, "clamp_position", arguments, layout=layout)
    with pytest.raises(AssertionError, match=reason):
        check(fault, "clamp_position", arguments, layout=layout)


@pytest.mark.parametrize(("fault", "repair"), [(changes_its_input, False), (forgets_to_repair, True)])
def test_an_input_that_should_have_been_left_or_repaired_is_found(fault, repair):
    with pytest.raises(AssertionError, match="topk changed"):
        check(fault, "topk_valid_length", {"topk": SELECTION, "repair": repair})
