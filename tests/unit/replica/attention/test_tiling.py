"""How a step is cut up for a card: worked examples, and the laws that hold for any step."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.attention import tiling
from replica.attention.tiling import Card, LayerKind, Span, Splitting, TileShape

H100 = Card(processors=132, shared_bytes=232_448)
A100 = Card(processors=108, shared_bytes=163 << 10)
SMALLEST = Card(processors=58, shared_bytes=99 << 10)  # of the cards that are served
LLAMA_8B = LayerKind(kv_heads=8, group=4, key_dim=128, value_dim=128, window=None, itemsize=2)


def kind(**changes: int | None) -> LayerKind:
    return LayerKind(**{**{"kv_heads": 1, "group": 1, "key_dim": 64, "value_dim": 64, "window": None,
                           "itemsize": 2}, **changes})  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize(
    ("dim", "lanes"), [(1, 16), (16, 16), (17, 32), (64, 64), (80, 128), (192, 256), (256, 256)]
)
def test_dimensions_are_padded_to_powers_of_two(dim: int, lanes: int) -> None:
    assert tiling.lanes(dim) == lanes


@pytest.mark.parametrize(
    ("most_rows", "layer", "card", "shape"),
    [
        # 128 queries of 128 take 32 KiB; 64 keys and values of 128 take 32 KiB, three times over.
        (128, LLAMA_8B, H100, TileShape(rows=128, keys=64, num_warps=8, num_stages=3)),
        (128, LLAMA_8B, A100, TileShape(rows=128, keys=64, num_warps=8, num_stages=3)),
        (128, LLAMA_8B, SMALLEST, TileShape(rows=128, keys=64, num_warps=8, num_stages=2)),
        # A decode: four query heads. 100 KiB with a third stage.
        (4, LLAMA_8B, H100, TileShape(rows=16, keys=64, num_warps=4, num_stages=3)),
        (4, LLAMA_8B, SMALLEST, TileShape(rows=16, keys=64, num_warps=4, num_stages=2)),
        (4, kind(), SMALLEST, TileShape(rows=16, keys=64, num_warps=4, num_stages=3)),
        (128, kind(key_dim=256, value_dim=256), H100, TileShape(64, 32, num_warps=8, num_stages=3)),
        (128, kind(itemsize=4), H100, TileShape(rows=64, keys=64, num_warps=8, num_stages=3)),
        (71, kind(group=71), H100, TileShape(rows=128, keys=64, num_warps=8, num_stages=3)),
    ],
)
def test_tile_shapes(most_rows: int, layer: LayerKind, card: Card, shape: TileShape) -> None:
    assert tiling.tile_shape(most_rows, layer, card) == shape


def test_a_chunk_with_context_and_two_decodes_by_hand() -> None:
    """Two query heads per K/V head, tiles of 16 rows (8 tokens) and 16 keys, one program at a time."""
    card = Card(processors=1, shared_bytes=1)  # the smallest tiles there are
    layer = kind(group=2)
    spans = [Span(0, 1, 4), Span(1, 1, 40), Span(2, 20, 30)]
    decodes, prefill = tiling.launches(spans, num_decodes=2, kind=layer, card=card)
    # Position 40 sees 41 keys, three tiles; position 4 sees five, one tile. The longer walk comes first.
    assert decodes.tiles.tolist() == [[1, 0], [0, 0]]
    assert (decodes.first_row, decodes.num_rows) == (0, 2)
    assert decodes.splitting == Splitting(1, 3)
    # 20 tokens are 40 rows: tokens 0 to 7, 8 to 15 and 16 to 19, that see up to positions 37, 45 and 49.
    assert prefill.tiles.tolist() == [[2, 32], [2, 0], [2, 16]]
    assert (prefill.first_row, prefill.num_rows) == (2, 20)


@pytest.mark.parametrize(
    ("seen", "kv_heads", "card", "wanted"),
    [
        # One sequence of 16,384 on 8 K/V heads: 8 walks of 256 tiles for 264 places, so 32 each.
        ([256], 8, H100, Splitting(32, 8)),
        # 64 of them fill the card twice over: nobody waits for anybody.
        ([256] * 64, 8, H100, Splitting(1, 256)),
        # One long among 63 short: it alone is cut, they fit in one part.
        ([2048] + [4] * 63, 8, H100, Splitting(30, 70)),
        # Short ones are not worth a merge, however idle the card.
        ([7], 1, H100, Splitting(1, 7)),
        ([8], 1, H100, Splitting(2, 4)),
        # No more parts than the merging kernel has lanes for.
        ([10_000], 1, Card(1000, 1 << 17), Splitting(64, 157)),
    ],
)
def test_splits(seen: list[int], kv_heads: int, card: Card, wanted: Splitting) -> None:
    assert tiling.splitting(seen, kv_heads, tiling.MOST_SPLITS, card) == wanted


def test_parts_never_take_more_memory_than_their_limit() -> None:
    wide = kind(kv_heads=32, group=4, key_dim=256, value_dim=256)
    (cut,) = tiling.launches([Span(0, 1000, 200_000)], 0, wide, Card(10_000, 1 << 17))
    assert 1 < cut.splitting.splits <= tiling.MOST_PARTIAL_NUMBERS // (1000 * 128 * 256)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Span], int]:
    starts = st.integers(0, 300)
    decodes = draw(st.lists(starts, max_size=5))
    prefills = draw(st.lists(st.tuples(starts, st.integers(2, 150)), min_size=not decodes, max_size=4))
    spans, row = [], 0
    for start, num_new in [*((start, 1) for start in decodes), *prefills]:
        spans.append(Span(row, num_new, start))
        row += num_new
    return spans, len(decodes)


kinds = st.builds(
    LayerKind,
    kv_heads=st.integers(1, 8),
    group=st.integers(1, 71),
    key_dim=st.integers(1, 256),
    value_dim=st.integers(1, 256),
    window=st.none() | st.integers(1, 300),
    itemsize=st.sampled_from([2, 4]),
)
cards = st.builds(
    Card, processors=st.integers(1, 200), shared_bytes=st.sampled_from([1, 2048, 1 << 15, 1 << 18])
)


@given(step=steps(), layer=kinds, card=cards)
def test_every_row_is_in_one_tile_and_every_key_it_sees_in_one_split(
    step: tuple[list[Span], int], layer: LayerKind, card: Card
) -> None:
    spans, num_decodes = step
    cut = tiling.launches(spans, num_decodes, layer, card)
    assert [each.num_rows for each in cut] == [
        rows for rows in (num_decodes, sum(span.num_new for span in spans[num_decodes:])) if rows
    ]
    covered: Counter[tuple[int, int]] = Counter()
    for each in cut:
        walks = []
        for owner, first in each.tiles.tolist():
            span = spans[owner]
            assert each.first_row <= span.first_row < each.first_row + each.num_rows
            rows = range(first, min(first + each.shape.rows, span.num_new * layer.group))
            assert rows, "a tile without a query"
            covered.update((owner, row) for row in rows)
            positions = [span.start + row // layer.group for row in (rows[0], rows[-1])]
            first_key = 0 if layer.window is None else max(0, positions[0] + 1 - layer.window)
            walks.append(positions[1] // each.shape.keys - first_key // each.shape.keys + 1)
        assert walks == sorted(walks, reverse=True), "the longest walks begin first"
        splits, per_split = each.splitting.splits, each.splitting.tiles_per_split
        assert (splits - 1) * per_split < walks[0] <= splits * per_split
        assert splits == 1 or per_split >= tiling.FEWEST_TILES_PER_SPLIT
        assert splits <= tiling.MOST_SPLITS
        # Nobody walks more than about twice an even share, unless cutting it up would not pay.
        share = -(-sum(walks) * layer.kv_heads // (tiling.PROGRAMS_PER_PROCESSOR * card.processors))
        assert per_split < 2 * max(share, tiling.FEWEST_TILES_PER_SPLIT, -(-walks[0] // tiling.MOST_SPLITS))
    assert covered == Counter(
        (owner, row) for owner, span in enumerate(spans) for row in range(span.num_new * layer.group)
    )


@given(most_rows=st.integers(1, 4096), layer=kinds, card=cards)
def test_tiles_fit_shared_memory_and_registers(most_rows: int, layer: LayerKind, card: Card) -> None:
    shape = tiling.tile_shape(most_rows, layer, card)
    key_lanes, value_lanes = tiling.lanes(layer.key_dim), tiling.lanes(layer.value_dim)
    assert shape.rows >= tiling.FEWEST_LANES
    assert shape.keys >= tiling.FEWEST_LANES
    assert np.log2([shape.rows, shape.keys]) % 1 == pytest.approx(0)
    assert shape.rows * value_lanes <= tiling.MOST_ACCUMULATED
    if shape.keys > tiling.FEWEST_LANES:
        kept = shape.rows * key_lanes + shape.num_stages * shape.keys * (key_lanes + value_lanes)
        assert kept * layer.itemsize <= card.shared_bytes


@given(layer=kinds)
def test_the_widest_heads_fit_every_card_that_is_served(layer: LayerKind) -> None:
    """Cards with the least shared memory since compute capability 8.0 give a program 99 KiB."""
    shape = tiling.tile_shape(tiling.MOST_ROWS, layer, SMALLEST)
    key_lanes, value_lanes = tiling.lanes(layer.key_dim), tiling.lanes(layer.value_dim)
    kept = shape.rows * key_lanes + shape.num_stages * shape.keys * (key_lanes + value_lanes)
    assert kept * layer.itemsize <= SMALLEST.shared_bytes
