"""How a step is cut up for a card: worked examples, and the laws that hold for any step."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.attention import tiling
from replica.attention.tiling import Card, Launch, LayerKind, Span, Splitting, TileShape

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
    assert decodes.tiles.tolist() == [[1, 0, 0, 3], [0, 0, 0, 3]]
    assert (decodes.first_row, decodes.num_rows) == (0, 2)
    assert decodes.splitting == Splitting(1, 3)
    # 20 tokens are 40 rows: tokens 0 to 7, 8 to 15 and 16 to 19, that see up to positions 37, 45 and 49.
    assert prefill.tiles.tolist() == [[2, 32, 0, 4], [2, 0, 0, 4], [2, 16, 0, 4]]
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


def test_only_walks_that_are_cut_take_more_than_one_program() -> None:
    """A decode of 2,048 tiles among 63 of 4: 30 programs for it and one for each of them."""
    spans = [Span(row, 1, 255) for row in range(63)] + [Span(63, 1, 2048 * 64 - 1)]
    (cut,) = tiling.launches(spans, 64, LLAMA_8B, H100)
    assert cut.splitting == Splitting(30, 70)
    assert Counter(cut.tiles[:, 0].tolist()) == {**dict.fromkeys(range(63), 1), 63: 30}
    assert sorted(cut.tiles[cut.tiles[:, 0] == 63, 2].tolist()) == list(range(30))


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
        splits, per_split = each.splitting.splits, each.splitting.tiles_per_split
        assert splits <= tiling.MOST_SPLITS
        assert (each.tiles[:, 3] == per_split).all()
        walks = walks_of(each, spans, layer)
        for (owner, first), walk in walks.items():
            span = spans[owner]
            assert each.first_row <= span.first_row < each.first_row + each.num_rows
            rows = range(first, min(first + each.shape.rows, span.num_new * layer.group))
            assert rows, "a tile without a query"
            covered.update((owner, row) for row in rows)
            own = each.tiles[(each.tiles[:, 0] == owner) & (each.tiles[:, 1] == first), 2]
            assert sorted(own.tolist()) == list(range(-(-walk // per_split))), "a key in no split, or in two"
        parts = [
            min(per_split, walks[owner, first] - split * per_split)
            for owner, first, split, _ in each.tiles.tolist()
        ]
        assert parts == sorted(parts, reverse=True), "the longest walks begin first"
        longest = max(walks.values())
        assert (splits - 1) * per_split < longest <= splits * per_split
        assert splits == 1 or per_split >= tiling.FEWEST_TILES_PER_SPLIT
        # Nobody walks more than about twice an even share, unless cutting it up would not pay.
        share = -(-sum(walks.values()) * layer.kv_heads // (tiling.PROGRAMS_PER_PROCESSOR * card.processors))
        assert per_split < 2 * max(share, tiling.FEWEST_TILES_PER_SPLIT, -(-longest // tiling.MOST_SPLITS))
    assert covered == Counter(
        (owner, row) for owner, span in enumerate(spans) for row in range(span.num_new * layer.group)
    )


def walks_of(cut: Launch, spans: list[Span], layer: LayerKind) -> dict[tuple[int, int], int]:
    """Tiles of keys that each tile of queries (span, first row) sees."""
    walks = {}
    for owner, first, _, per_split in cut.tiles.tolist():
        if not per_split:
            continue
        span = spans[owner]
        last = min(first + cut.shape.rows, span.num_new * layer.group) - 1
        positions = [span.start + row // layer.group for row in (first, last)]
        first_key = 0 if layer.window is None else max(0, positions[0] + 1 - layer.window)
        walks[owner, first] = positions[1] // cut.shape.keys - first_key // cut.shape.keys + 1
    return walks


@given(
    lengths=st.lists(st.integers(1, 40_000), min_size=1, max_size=70),
    spare=st.integers(0, 40_000),
    layer=kinds,
    card=cards,
)
def test_a_recorded_step_is_cut_as_if_it_were_planned_alone(
    lengths: list[int], spare: int, layer: LayerKind, card: Card
) -> None:
    """In as many programs and splits for every step of its shape, of equal lengths or of mixed ones."""
    longest = max(lengths) + spare
    spans = [Span(row, 1, length - 1) for row, length in enumerate(lengths)]
    (own,) = tiling.launches(spans, len(spans), layer, card)
    recorded = tiling.refillable(spans, longest, layer, card)
    assert recorded.tiles[: len(own.tiles)].tolist() == own.tiles.tolist()
    assert not recorded.tiles[len(own.tiles) :].any()
    assert recorded.splitting.splits >= own.splitting.splits
    for others in ([longest] * len(spans), [1] * len(spans), [*[1] * (len(spans) - 1), longest]):
        again = tiling.refillable(
            [Span(row, 1, each - 1) for row, each in enumerate(others)], longest, layer, card
        )
        assert again.tiles.shape == recorded.tiles.shape
        assert again.splitting.splits == recorded.splitting.splits
        assert (again.first_row, again.num_rows) == (recorded.first_row, recorded.num_rows)


def test_one_long_decode_among_63_short_ones_is_cut_when_recorded() -> None:
    """Cut for 64 of the shape's length it was one walk of 250 tiles, where the plan of its own has 39."""
    spans = [Span(row, 1, 999) for row in range(63)] + [Span(63, 1, 15_999)]
    recorded = tiling.refillable(spans, 16_384, LLAMA_8B, H100)
    assert recorded.splitting.tiles_per_split == 39
    assert recorded.splitting.splits == 27  # room for 256 tiles among 63 walks of one
    assert len(recorded.tiles) == 64 + 2 * 132 // 8  # and no more programs than fill the card
    assert recorded.tiles[recorded.tiles[:, 3] > 0, 0].tolist().count(63) == 7


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
