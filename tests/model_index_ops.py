"""What the index ops mean, element by element: loops over Python integers and nothing else.

Written from the specification alone, to hold every implementation against; it calls nothing of
opgraft and knows no tensors. Vectors are sequences of ints, tables are sequences of rows. Where an
op writes into a caller's buffer the model takes that buffer's content and gives the new content.
"""

from __future__ import annotations

from collections.abc import Sequence

Vector = Sequence[int]
Table = Sequence[Sequence[int]]

ABSENT = -1


def wrapped(value: int, bits: int = 32) -> int:
    """What an integer of so many bits keeps of a value."""
    low = value % 2**bits
    return low - 2**bits if low >= 2 ** (bits - 1) else low


def columns_of(table: Table) -> int:
    return len(table[0]) if len(table) else 0


def read(table: Table, row: int, position: int, page_size: int = 1) -> int:
    """The slot at a position of a row; absent outside the table."""
    column = position // page_size
    if not (0 <= row < len(table) and 0 <= column < columns_of(table)):
        return ABSENT
    entry = table[row][column]
    if page_size == 1:
        return entry
    return ABSENT if entry < 0 else entry * page_size + position % page_size


def clamp_position(seq_lens: Vector) -> list[int]:
    return [max(length, 1) - 1 for length in seq_lens]


def csr_kv_indices(
    table: Table,
    rows: Vector,
    lengths: Vector,
    indptr: Vector,
    starts: Vector | None = None,
    *,
    page_size: int = 1,
    token_map: Vector | None = None,
    total: int | None = None,
    out: Vector | None = None,
    bits: int = 32,
) -> list[int]:
    size = max(indptr[-1], 0) if total is None else total
    result = [ABSENT] * size if out is None else list(out)
    for request, row in enumerate(rows):
        start = 0 if starts is None else starts[request]
        first = indptr[request]
        for place in range(max(first, 0), min(first + lengths[request], len(result))):
            slot = read(table, row, start + place - first, page_size)
            if token_map is not None:
                slot = token_map[slot] if 0 <= slot < len(token_map) else ABSENT
            result[place] = wrapped(slot, bits)
    return result


def chunked_prefix_kv_indices(
    table: Table, rows: Vector, starts: Vector, chunk_lens: Vector, cu: Vector, out: Vector
) -> list[int]:
    """The chunked-prefix form by itself: starts are mandatory, page size 1, no map."""
    result = list(out)
    for request, row in enumerate(rows):
        for j in range(chunk_lens[request]):
            result[cu[request] + j] = table[row][starts[request] + j]
    return result


def block_table(
    table: Table,
    rows: Vector,
    lengths: Vector,
    starts: Vector | None = None,
    *,
    page_size: int,
    max_pages: int | None = None,
    tail: int | None = None,
    out: Table | None = None,
) -> list[list[int]]:
    result = []
    for request, row in enumerate(rows):
        if out is not None and tail is None:
            line = list(out[request])
        else:
            width = len(out[request]) if out is not None else max_pages
            line = [ABSENT if tail is None else tail] * width
        start = 0 if starts is None else starts[request]
        pages = -(-max(lengths[request], 0) // page_size)
        for j in range(min(pages, len(line))):
            slot = read(table, row, start + j * page_size)
            line[j] = ABSENT if slot < 0 else wrapped(slot // page_size)
        result.append(line)
    return result


def prefill_aware_page_table(
    table: Table,
    rows: Vector,
    seq_lens: Vector,
    prefill_lens: Vector,
    *,
    window: int,
    max_kv: int | None = None,
    out: Table | None = None,
) -> tuple[list[list[int]], list[int]]:
    pages, counts = [], []
    for request, row in enumerate(rows):
        line = [0] * max_kv if out is None else list(out[request])
        width = len(line)
        length = max(seq_lens[request], 0)
        prompt = max(prefill_lens[row], 0) if 0 <= row < len(table) else 0
        prompt = min(prompt, length)
        begin = max(prompt, length - window)
        if prompt + length - begin > width:
            # Too much in sight: the prompt, then as much of the window's end as there is room.
            kept = max(width - prompt, 0)
            prompt, begin = min(prompt, width), length - kept
        count = prompt + length - begin
        for j in range(count):
            position = j if j < prompt else begin + j - prompt
            line[j] = wrapped(read(table, row, position))
        pages.append(line)
        counts.append(count)
    return pages, counts


def seqlens_expand(q_lens: Vector, kv_lens: Vector, *, total: int) -> list[int]:
    result: list[int] = []
    for queries, length in zip(q_lens, kv_lens, strict=True):
        for i in range(queries):
            if len(result) == total:
                return result
            result.append(wrapped(max(max(length, 0) - queries + 1 + i, 0)))
    return result + [0] * (total - len(result))


def compact_valid_indices(
    indices: Table, indptr: Vector | None = None, *, out: Vector | None = None
) -> tuple[list[int], list[int]]:
    result = [ABSENT] * (len(indices) * columns_of(indices)) if out is None else list(out)
    places = [0]
    for line in indices:
        places.append(places[-1] + sum(value >= 0 for value in line))
    if indptr is not None:
        places = list(indptr)
    for row, line in enumerate(indices):
        place = places[row]
        for value in line:
            if value >= 0:
                if 0 <= place < len(result):
                    result[place] = wrapped(value)
                place += 1
    return [wrapped(place) for place in places], result


def topk_to_slots(
    table: Table, topk: Table, *, cu_q: Vector | None = None, output_rows: int | None = None, page_size: int = 1
) -> list[list[int]]:
    def owner(token: int) -> int:
        if cu_q is None:
            return token
        owners = [b for b in range(len(cu_q) - 1) if cu_q[b] <= token < cu_q[b + 1]]
        return owners[-1] if owners else ABSENT

    def slots(row: int, line: Vector) -> list[int]:
        return [ABSENT if position < 0 else wrapped(read(table, row, position, page_size)) for position in line]

    rows = len(topk) if output_rows is None else output_rows
    absent = [ABSENT] * columns_of(topk)
    result = [slots(owner(token), line) for token, line in enumerate(topk)]
    return result + [list(absent) for _ in range(rows - len(topk))]


def topk_valid_length(
    topk: Table, *, rule: str = "last", minimum: int = 1, repair: bool = False
) -> tuple[list[int], list[list[int]]]:
    """The lengths, and the selection afterwards."""
    lengths, after = [], []
    for line in topk:
        valid = [j for j, position in enumerate(line) if position >= 0]
        last = valid[-1] + 1 if valid else 0
        lengths.append(max(last if rule == "last" else len(valid), minimum))
        kept = list(line)
        if repair and not valid and kept:
            kept[0] = 0
        after.append(kept)
    return lengths, after


def topk_to_slots_dcp(slots: Table, *, world_size: int, rank: int) -> tuple[list[list[int]], list[int]]:
    local, counts = [], []
    for line in slots:
        owned = [wrapped(slot // world_size) for slot in line if slot >= 0 and slot % world_size == rank]
        counts.append(len(owned))
        local.append(owned + [ABSENT] * (len(line) - len(owned)))
    return local, counts


def extend_positions(prefix_lens: Vector, extend_lens: Vector, *, total: int, out: Vector | None = None) -> list[int]:
    result = [0] * total if out is None else list(out)
    place = 0
    for request, length in enumerate(extend_lens):
        prefix = max(prefix_lens[request], 0) if len(prefix_lens) else 0
        for i in range(length):
            if place == total:
                return result
            result[place] = wrapped(prefix + i, 64)
            place += 1
    return result


def owned_tokens(begin: int, length: int, world_size: int, rank: int) -> int:
    """How many of the places [begin, begin + length) belong to a rank."""

    def before(end: int) -> int:
        return end // world_size + (end % world_size > rank)

    return before(begin + length) - before(begin)


def cp_interleave_split(extend_lens: Vector, *, world_size: int, rank: int) -> tuple[list[int], list[int]]:
    shares, requests, begin = [], [], 0
    for request, length in enumerate(extend_lens):
        share = owned_tokens(begin, max(length, 0), world_size, rank)
        begin += max(length, 0)
        if share > 0:
            shares.append(share)
            requests.append(request)
    missing = len(extend_lens) - len(shares)
    return shares + [0] * missing, requests + [ABSENT] * missing
