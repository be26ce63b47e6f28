"""What ``attention.compact_valid_indices`` means."""

from __future__ import annotations

import torch

from opgraft.ops import attention

SELECTION = torch.tensor([[5, -1, 7], [-1, -2, -(2**31)], [-1, 0, 9]], dtype=torch.int32)


def call(selection=SELECTION, indptr=None, **options):
    given = None if indptr is None else torch.tensor(indptr)
    places, values = attention.compact_valid_indices(selection, given, backend="native", **options)
    return places.tolist(), values.tolist()


def test_valid_indices_keep_their_order_and_the_rest_is_absent():
    assert ([0, 2, 2, 4], [5, 7, 0, 9, -1, -1, -1, -1, -1]) == call()


def test_given_places_are_used_and_given_back_as_a_copy():
    assert ([1, 4, 4, 6], [-1, 5, 7, -1, 0, 9, -1, -1, -1]) == call(indptr=[1, 4, 4, 6])
    indptr = torch.tensor([0, 2, 2, 4], dtype=torch.int32)
    places, _ = attention.compact_valid_indices(SELECTION, indptr)
    assert places is not indptr
    assert torch.equal(indptr, places)


def test_a_buffer_keeps_what_no_index_covers_and_drops_what_does_not_fit():
    assert ([0, 2, 2, 4], [5, 7, 0]) == call(out=torch.full((3,), -77, dtype=torch.int32))
    assert ([0, 2, 2, 4], [5, 7, 0, 9, -77]) == call(out=torch.full((5,), -77, dtype=torch.int32))


def test_places_outside_the_buffer_are_dropped():
    whole = torch.full((4,), -77, dtype=torch.int32)
    call(indptr=[-1, 5, 5, 0], out=whole[1:3])
    assert [-77, 7, -77, -77] == whole.tolist()


def test_empty_selections_have_places_all_the_same():
    assert ([0], []) == call(SELECTION[:0])
    assert ([0, 0, 0, 0], []) == call(SELECTION[:, :0])


def test_rows_may_be_strided():
    assert ([0, 2, 2, 3], [5, 7, 9, -1, -1, -1]) == call(SELECTION[:, ::2])
