"""What ``attention.topk_to_slots_dcp`` means."""

from __future__ import annotations

import torch

from opgraft.ops import attention


def call(slots, world_size, rank):
    local, counts = attention.topk_to_slots_dcp(torch.tensor(slots), world_size=world_size, rank=rank, backend="native")
    return local.tolist(), counts.tolist()


def test_a_rank_keeps_its_slots_in_order_and_counts_them():
    slots = [[8, 3, -1, 5], [2, 4, 6, 0], [-2, 7, 1, 9]]
    assert ([[1, 2, -1, -1], [-1] * 4, [3, 0, 4, -1]], [2, 0, 3]) == call(slots, 2, 1)
    assert ([[4, -1, -1, -1], [1, 2, 3, 0], [-1] * 4], [1, 4, 0]) == call(slots, 2, 0)


def test_a_world_of_one_only_compacts():
    assert ([[8, 3, 5, -1]], [3]) == call([[8, -1, 3, 5]], 1, 0)


def test_the_ranks_share_all_slots_among_them():
    generator = torch.Generator().manual_seed(6)
    slots = torch.randint(-9, 999, (17, 2051), generator=generator)
    for world_size in (1, 2, 3, 6, 8):
        found = [[] for _ in range(17)]
        for rank in range(world_size):
            local, counts = attention.topk_to_slots_dcp(slots, world_size=world_size, rank=rank)
            for row, (values, count) in enumerate(zip(local.tolist(), counts.tolist(), strict=True)):
                assert all(value == -1 for value in values[count:])
                found[row] += [value * world_size + rank for value in values[:count]]
        for row, values in enumerate(slots.tolist()):
            assert sorted(value for value in values if value >= 0) == sorted(found[row])


def test_empty_selections_count_nothing():
    local, counts = attention.topk_to_slots_dcp(torch.empty((2, 0), dtype=torch.int64), world_size=2, rank=0)
    assert ((2, 0), [0, 0]) == (tuple(local.shape), counts.tolist())
    local, counts = attention.topk_to_slots_dcp(torch.empty((0, 4), dtype=torch.int64), world_size=2, rank=0)
    assert ((0, 4), []) == (tuple(local.shape), counts.tolist())
