"""What ``attention.prefill_aware_page_table`` means."""

from __future__ import annotations

import torch

from opgraft.ops import attention

TABLE = torch.arange(100, 120, dtype=torch.int32).view(2, 10)


def call(rows, lengths, prompts, table=TABLE, **options):
    vectors = [torch.tensor(values, dtype=torch.int64) for values in (rows, lengths, prompts)]
    pages, counts = attention.prefill_aware_page_table(table, *vectors, backend="native", **options)
    return pages.tolist(), counts.tolist()


def canary(*shape):
    return torch.full(shape, -77, dtype=torch.int32)


def test_the_prompt_stays_in_sight_and_the_window_slides():
    pages, counts = call([1], [9], [0, 3], window=2, max_kv=6)
    assert ([[110, 111, 112, 117, 118, 0]], [5]) == (pages, counts)


def test_without_a_gap_the_table_is_the_row():
    assert ([[100, 101, 102, 103]], [4]) == call([0], [4], [3, 0], window=1, max_kv=4)


def test_a_prompt_length_that_is_stale_ends_with_the_sequence():
    assert ([[100, 101, 0]], [2]) == call([0], [2], [8, 0], window=4, max_kv=3)


def test_without_a_window_only_the_prompt_is_in_sight():
    assert ([[100, 101, 102, 0]], [3]) == call([0], [9], [3, 0], window=0, max_kv=4)


def test_the_prompt_belongs_to_the_request_slot_not_to_the_batch_row():
    pages, counts = call([1, 0], [5, 5], [1, 2], window=1, max_kv=3)
    assert ([[110, 111, 114], [100, 104, 0]], [3, 2]) == (pages, counts)


def test_an_empty_request_leaves_its_row_alone():
    pages, counts = call([0, 1], [0, -5], [3, 3], window=2, out=canary(2, 2))
    assert ([[-77, -77], [-77, -77]], [0, 0]) == (pages, counts)


def test_a_buffer_keeps_its_tail():
    pages, counts = call([0], [5], [1, 0], window=1, out=canary(1, 4), out_lens=canary(1))
    assert ([[100, 104, -77, -77]], [2]) == (pages, counts)


def test_either_buffer_may_be_given_alone():
    lengths = canary(1)
    table, counts = attention.prefill_aware_page_table(
        TABLE, *map(torch.tensor, ([0], [5], [1, 0])), window=1, max_kv=4, out_lens=lengths
    )
    assert counts is lengths
    assert [[100, 104, 0, 0]] == table.tolist()


def test_a_window_that_does_not_fit_shrinks_to_its_end():
    assert ([[100, 101, 107, 108]], [4]) == call([0], [9], [2, 0], window=5, max_kv=4)


def test_a_prompt_that_does_not_fit_is_cut_off():
    assert ([[100, 101]], [2]) == call([0], [9], [5, 0], window=5, max_kv=2)


def test_no_columns_give_lengths_of_zero():
    assert ([[], []], [0, 0]) == call([0, 1], [9, 9], [2, 2], window=5, max_kv=0)
    lengths = canary(2)
    call([0, 1], [9, 9], [2, 2], window=5, out=canary(2, 0), out_lens=lengths)
    assert [0, 0] == lengths.tolist()


def test_positions_beyond_the_table_are_absent():
    assert ([[100, 109, -1, -1]], [4]) == call([0], [12], [1, 0], window=3, max_kv=4)


def test_requests_outside_the_pool_are_absent_and_have_no_prompt():
    assert ([[-1, -1, 0], [-1, -1, 0]], [2, 2]) == call([-1, 2], [9, 9], [4, 4, 4], window=2, max_kv=3)


def test_a_wide_window_makes_it_the_block_table_of_page_size_one():
    generator = torch.Generator().manual_seed(4)
    table = torch.randint(-1, 2**20, (7, 90), generator=generator, dtype=torch.int32)
    rows = torch.randint(0, 7, (20,), generator=generator)
    lengths = torch.randint(0, 90, (20,), generator=generator)
    prompts = torch.randint(0, 90, (7,), generator=generator)
    out = canary(20, 95)
    attention.prefill_aware_page_table(table, rows, lengths, prompts, window=90, out=out)
    blocks = attention.block_table(table, rows, lengths, page_size=1, out=canary(20, 95))
    assert torch.equal(blocks, out)
