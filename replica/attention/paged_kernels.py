"""Triton kernels: attention straight from K/V pages, and the merge of its parts.

Importing this imports Triton; whether the kernels are then compiled or interpreted is Triton's setting at
that moment (`TRITON_INTERPRET`). Knows pointers and tiles (`tiling.py`); knows neither torch nor requests.

The online softmax is Milakov and Gimelshein's (2018), tiled as in Dao's FlashAttention-2 (2023); splitting
the keys of decodes is Flash-Decoding's (Dao et al. 2023); pages are vLLM's (Kwon et al. 2023). Scores are
in base 2: a factor of log2(e) is in their scale already.

What a mask hides is not read: slots after a tile's last key, or behind its window, may hold anything.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def touch(number):
    """Sets one int32 to 1: whether kernels can be compiled and started at all."""
    tl.store(number, 1)


@triton.jit
def _tanh(x):
    shrunk = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))  # at most 1, so nothing overflows
    size = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0, -size, size)


@triton.jit
def _load(places, is_key, is_lane, IS_EDGE: tl.constexpr, IS_PADDED: tl.constexpr):
    """K or V of a tile, 0 where there is none. Masks are left out where they would hide nothing."""
    if IS_EDGE:
        numbers = tl.load(places, mask=is_key & is_lane, other=0.0)
    elif IS_PADDED:
        numbers = tl.load(places, mask=is_lane, other=0.0)
    else:
        numbers = tl.load(places)
    return numbers


@triton.jit
def _block_ids(table, tile, end, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """The block of each key of a tile; 0 from `end` on, where the table may have none."""
    key = tile * KEYS + tl.arange(0, KEYS)
    return tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)


@triton.jit
def _walk(
    attended,
    top,
    total,
    queries,
    position,
    keys,
    values,
    table,
    first_tile,
    last_tile,
    begin,
    end,
    window,
    factor,
    cap,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_LANES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRODUCT: tl.constexpr,
    IS_EDGE: tl.constexpr,
):
    """Take in tiles [first_tile, last_tile) of keys. IS_EDGE: some row may not see some of them.

    attended (ROWS, VALUE_LANES), top and total (ROWS,): sums of weighted values, the highest score so far
    and the sum of weights, both sums relative to 2 ** top.
    """
    key_lane = tl.arange(0, KEY_LANES)
    value_lane = tl.arange(0, VALUE_LANES)
    # The next tile's block ids are asked for before this one is computed: K and V of a tile are then loads
    # that wait for nothing within the loop, which the compiler sends ahead by all its stages.
    block = _block_ids(table, first_tile, end, BLOCK_SIZE, KEYS)
    for tile in range(first_tile, last_tile):
        next_block = _block_ids(table, tile + 1, end, BLOCK_SIZE, KEYS)
        key = tile * KEYS + tl.arange(0, KEYS)
        is_key = (key >= begin) & (key < end)
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        tile_keys = _load(
            keys + slot[None, :] * (KV_HEADS * KEY_DIM) + key_lane[:, None],
            is_key[None, :],
            (key_lane < KEY_DIM)[:, None],
            IS_EDGE,
            KEY_DIM != KEY_LANES,
        )
        scores = tl.dot(queries, tile_keys.to(PRODUCT), input_precision="ieee") * factor
        if HAS_CAP:
            scores = _tanh(scores) * cap
        if IS_EDGE:
            is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
            if HAS_WINDOW:
                is_seen &= key[None, :] > position[:, None] - window
            scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # A row that has seen nothing yet has no highest score; any finite one will do.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(top - base)
        total = total * kept + tl.sum(weights, axis=1)
        tile_values = _load(
            values + slot[:, None] * (KV_HEADS * VALUE_DIM) + value_lane[None, :],
            is_key[:, None],
            (value_lane < VALUE_DIM)[None, :],
            IS_EDGE,
            VALUE_DIM != VALUE_LANES,
        )
        weights = weights.to(values.dtype.element_ty).to(PRODUCT)
        attended = tl.dot(weights, tile_values.to(PRODUCT), attended * kept[:, None], input_precision="ieee")
        top = new_top
        block = next_block
    return attended, top, total


@triton.jit(do_not_specialize=["window", "splits", "base_row", "num_rows"])
def attend(
    out,  # (T, heads, value_dim)
    query,  # (heads, T, key_dim), strides given
    keys,  # (slots, kv_heads, key_dim)
    values,  # (slots, kv_heads, value_dim)
    sinks,  # (heads,); not read without HAS_SINKS
    parts,  # (splits, num_rows, heads, value_dim) float32; not written with one split
    part_sums,  # (splits, num_rows, heads) float32: base-2 logarithms of a part's sum of weights, or -inf
    tiles,  # (programs, 4) int32: span, first of its query rows, split, tiles of keys per split (0: none)
    spans,  # (spans, 4) int32: first row of the step, new tokens, first position, first entry in tables
    tables,  # int32: block ids
    query_head_stride,
    query_token_stride,
    factor,  # on a product of query and key; with a cap: what the cap's tanh gets, else in base 2
    cap,  # in base 2
    window,
    splits,  # of which every tile may have fewer; what it has not is -inf in `part_sums` before
    base_row,  # first row of the step that parts hold
    num_rows,  # rows that parts hold
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_LANES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRODUCT: tl.constexpr,  # type in which numbers are multiplied
):
    """One tile of queries of one K/V head over one split of its keys. Grid: (programs, kv_heads).

    How long a split is comes from memory: a recorded launch is replayed for other lengths, cut anew.
    """
    kv_head = tl.program_id(1)
    tile = tiles + 4 * tl.program_id(0)
    span = spans + 4 * tl.load(tile)
    first = tl.load(tile + 1)
    split = tl.load(tile + 2)
    tiles_per_split = tl.load(tile + 3)
    first_row = tl.load(span)
    num_new = tl.load(span + 1)
    start = tl.load(span + 2)
    table = tables + tl.load(span + 3)

    place = first + tl.arange(0, ROWS)
    token = place // GROUP
    head = kv_head * GROUP + place % GROUP
    is_row = (token < num_new) & (tiles_per_split > 0)
    position = start + token
    row = (first_row + token).to(tl.int64)
    first_position = start + first // GROUP
    last_position = start + tl.minimum((first + ROWS - 1) // GROUP, num_new - 1)

    key_lane = tl.arange(0, KEY_LANES)
    queries = tl.load(
        query + row[:, None] * query_token_stride + head[:, None] * query_head_stride + key_lane[None, :],
        mask=is_row[:, None] & (key_lane < KEY_DIM)[None, :],
        other=0.0,
    ).to(PRODUCT)
    keys += kv_head * KEY_DIM
    values += kv_head * VALUE_DIM

    # Some row sees keys [begin, end); every row sees tiles [first_open, last_open).
    end = last_position + 1
    begin = 0
    first_open = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position + 1 - window, 0)
        first_open = tl.cdiv(tl.maximum(last_position + 1 - window, 0), KEYS)
    last_open = (first_position + 1) // KEYS
    first_tile = begin // KEYS + split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, tl.cdiv(end, KEYS))
    last_open = tl.minimum(last_open, last_tile)

    attended = tl.zeros([ROWS, VALUE_LANES], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    next_tile = first_tile
    if HAS_WINDOW:
        next_tile = tl.maximum(first_tile, tl.minimum(first_open, last_tile))
        attended, top, total = _walk(
            attended, top, total, queries, position, keys, values, table, first_tile, next_tile, begin, end,
            window, factor, cap, KV_HEADS, KEY_DIM, KEY_LANES, VALUE_DIM, VALUE_LANES, BLOCK_SIZE, KEYS,
            HAS_WINDOW, HAS_CAP, PRODUCT, True,
        )  # fmt: skip
    attended, top, total = _walk(
        attended, top, total, queries, position, keys, values, table, next_tile, last_open, begin, end,
        window, factor, cap, KV_HEADS, KEY_DIM, KEY_LANES, VALUE_DIM, VALUE_LANES, BLOCK_SIZE, KEYS,
        HAS_WINDOW, HAS_CAP, PRODUCT, False,
    )  # fmt: skip
    attended, top, total = _walk(
        attended, top, total, queries, position, keys, values, table, tl.maximum(next_tile, last_open),
        last_tile, begin, end, window, factor, cap, KV_HEADS, KEY_DIM, KEY_LANES, VALUE_DIM, VALUE_LANES,
        BLOCK_SIZE, KEYS, HAS_WINDOW, HAS_CAP, PRODUCT, True,
    )  # fmt: skip

    value_lane = tl.arange(0, VALUE_LANES)
    is_stored = is_row[:, None] & (value_lane < VALUE_DIM)[None, :]
    if splits == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            new_top = tl.maximum(top, sink)
            kept = tl.exp2(top - new_top)
            total = total * kept + tl.exp2(sink - new_top)
            attended *= kept[:, None]
        # Rows that only fill the tile up may have seen nothing.
        attended /= tl.where(total == 0.0, 1.0, total)[:, None]
        places = out + (row * (GROUP * KV_HEADS) + head)[:, None] * VALUE_DIM + value_lane[None, :]
        tl.store(places, attended.to(out.dtype.element_ty), mask=is_stored)
    else:
        has_seen = total > 0.0
        divisor = tl.where(has_seen, total, 1.0)
        part = (split.to(tl.int64) * num_rows + row - base_row) * (GROUP * KV_HEADS) + head
        tl.store(part_sums + part, tl.where(has_seen, top + tl.log2(divisor), float("-inf")), mask=is_row)
        part_places = parts + part[:, None] * VALUE_DIM + value_lane[None, :]
        tl.store(part_places, attended / divisor[:, None], mask=is_stored & has_seen[:, None])


@triton.jit(do_not_specialize=["base_row", "num_rows", "splits"])
def merge(
    out,  # (T, heads, value_dim)
    parts,  # (splits, num_rows, heads, value_dim) float32; nothing where a part saw no key
    part_sums,  # (splits, num_rows, heads) float32: base-2 logarithms; -inf where a part saw no key
    sinks,  # (heads,); not read without HAS_SINKS
    base_row,  # row of the step that is the first of `parts`
    num_rows,
    splits,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Weigh one row and head's parts by the weight each of them saw. Grid: (num_rows, heads)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, MOST_SPLITS)
    lane = tl.arange(0, VALUE_LANES)
    place = (split * num_rows + row) * HEADS + head
    sums = tl.load(part_sums + place, mask=split < splits, other=float("-inf"))
    top = tl.max(sums, axis=0)  # finite: a token sees at least itself
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    weights = tl.exp2(sums - top)
    numbers = tl.load(
        parts + place[:, None] * VALUE_DIM + lane[None, :],
        mask=(sums > float("-inf"))[:, None] & (lane < VALUE_DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(weights, axis=0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    merged = tl.sum(numbers * weights[:, None], axis=0) / total
    places = out + ((base_row + row) * HEADS + head) * VALUE_DIM + lane
    tl.store(places, merged.to(out.dtype.element_ty), mask=lane < VALUE_DIM)
