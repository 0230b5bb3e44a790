"""How one step's attention is cut into programs for a card: tiles of queries, tiles of keys, splits.

Pure functions of numbers. Knows lengths, head shapes and what of a card limits them; knows neither
torch nor Triton, and never sees a tensor.

A K/V head's query rows are its tokens times the query heads that share it, token by token:

    row   0 .. group)            token 0, query heads 0 .. group of this K/V head
          group .. 2 * group)    token 1, the same heads
          ...

A tile is `TileShape.rows` of those, wherever they begin, so that a group which is no power of two wastes
nothing; K and V are then read once for all heads of the group. A program walks one tile's keys in tiles of
`TileShape.keys`; where there are too few programs for the card, or one would walk far longer than the
others, its keys are split among several and the parts are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Int32Array = np.ndarray[tuple[Any, ...], np.dtype[np.int32]]

# Tensor cores multiply tiles of at least 16 on each side.
FEWEST_LANES = 16
MOST_LANES = 256  # wider heads would leave no room for two tiles of keys: refused at start

MOST_ROWS = 128
MOST_KEYS = 64
# Numbers of the float32 result a program holds in registers: 64 a thread at eight warps.
MOST_ACCUMULATED = 1 << 14
LARGE = 1 << 13  # from here on eight warps hold it; four would spill
# Full float32 products take no tensor cores, and their operands take registers: tiles are smaller.
FLOAT32_SHRINK = 4

# Of a processor's shared memory. Sizes are such that two stages fit what every card since compute capability
# 8.0 lets one program have (99 KiB); what a card has beyond it takes a third stage, not larger tiles.
SHARED_BUDGET = 96 << 10
COMPILERS_OWN = 3 << 10  # left to the compiler, of whatever a card has
# With three stages the compiler loads a tile of K and V while the one before is multiplied: `async_wait` is
# above zero in its main loop. With two it does not, since one goes to the block ids that say where the tile
# lies; another program then has to compute in the meantime.
FEWEST_STAGES, MOST_STAGES = 2, 3

# Two decodes fit a processor: one computes while another waits for memory. Of prefills registers let one
# run at a time: there the second only makes walks shorter, so that all end at about the same time.
PROGRAMS_PER_PROCESSOR = 2
FEWEST_TILES_PER_SPLIT = 4  # below this, writing and merging a part costs more than its keys
MOST_SPLITS = 64  # the merging kernel holds one part per lane
MOST_PARTIAL_NUMBERS = 1 << 26  # parts before merging, float32: 256 MiB


@dataclass(frozen=True, slots=True)
class Card:
    """What of a GPU decides how attention is cut up."""

    processors: int  # streaming multiprocessors
    shared_bytes: int  # of shared memory that one program may have


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What layers must have in common to be cut up alike."""

    kv_heads: int
    group: int  # query heads per K/V head
    key_dim: int
    value_dim: int
    window: int | None
    itemsize: int  # bytes of one number of K and V


@dataclass(frozen=True, slots=True)
class TileShape:
    """One program's tiles."""

    rows: int  # of queries; a power of two, at least 16
    keys: int  # a power of two, at least 16
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's new tokens: rows [first_row, first_row + num_new) of the step, from position `start`."""

    first_row: int
    num_new: int
    start: int


@dataclass(frozen=True, slots=True)
class Splitting:
    """Programs per tile, and how many tiles of keys each of them walks. 1 split: nothing to merge."""

    splits: int
    tiles_per_split: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One run of the kernel, over step rows [first_row, first_row + num_rows), a program for each split."""

    shape: TileShape
    splitting: Splitting
    # (programs, 4): index of the span, first of its query rows, which split, tiles of keys a split; longest
    # walks first. A program whose last number is 0 has nothing to do.
    tiles: Int32Array
    first_row: int
    num_rows: int


def lanes(dim: int) -> int:
    """The power of two that a dimension is padded to, in registers alone."""
    return max(FEWEST_LANES, 1 << (dim - 1).bit_length())


def tile_shape(most_rows: int, kind: LayerKind, card: Card) -> TileShape:
    """The largest tiles that fit registers and shared memory; no taller than `most_rows` needs."""
    key_lanes, value_lanes = lanes(kind.key_dim), lanes(kind.value_dim)
    shrink = FLOAT32_SHRINK if kind.itemsize == 4 else 1
    budget = min(card.shared_bytes, SHARED_BUDGET)
    rows = min(lanes(most_rows), MOST_ROWS, MOST_ACCUMULATED // value_lanes // shrink)
    # Queries stay all along: a third of the memory at most, keys and values need the rest twice over.
    while rows > FEWEST_LANES and 3 * rows * key_lanes * kind.itemsize > budget:
        rows //= 2
    keys = MOST_KEYS
    query_bytes = rows * key_lanes * kind.itemsize
    bytes_per_key = (key_lanes + value_lanes) * kind.itemsize
    while keys > FEWEST_LANES and query_bytes + FEWEST_STAGES * keys * bytes_per_key > budget:
        keys //= 2
    is_deep = query_bytes + MOST_STAGES * keys * bytes_per_key <= card.shared_bytes - COMPILERS_OWN
    is_large = rows == MOST_ROWS or rows * value_lanes * shrink >= LARGE
    return TileShape(rows, keys, 8 if is_large else 4, MOST_STAGES if is_deep else FEWEST_STAGES)


def splitting(
    tiles_seen: Sequence[int] | Int32Array, kv_heads: int, most_splits: int, card: Card
) -> Splitting:
    """Cut the longest walks so that none takes more than about twice its share of the card.

    tiles_seen: tiles of keys that each tile of queries walks, for every K/V head alike; at least one.
    All cut at the same length, so that a short sequence beside a long one stays in one part.
    """
    total, longest = int(np.sum(tiles_seen)) * kv_heads, int(np.max(tiles_seen))
    share = -(-total // (PROGRAMS_PER_PROCESSOR * card.processors))
    most_splits = max(1, min(most_splits, MOST_SPLITS))
    per_split = max(share, FEWEST_TILES_PER_SPLIT, -(-longest // most_splits))
    if longest < 2 * per_split:
        return Splitting(1, longest)
    return Splitting(-(-longest // per_split), per_split)


def launch(spans: Sequence[Span], first_span: int, kind: LayerKind, shape: TileShape, card: Card) -> Launch:
    """Tiles of spans that stand side by side in the step. first_span: index of the first among all spans."""
    num_new = np.array([span.num_new for span in spans], dtype=np.int64)
    starts = np.array([span.start for span in spans], dtype=np.int64)
    per_span = -(-num_new * kind.group // shape.rows)
    owners = np.repeat(np.arange(len(spans)), per_span)
    firsts = (np.arange(len(owners)) - np.repeat(np.cumsum(per_span) - per_span, per_span)) * shape.rows
    last_tokens = np.minimum((firsts + shape.rows - 1) // kind.group, num_new[owners] - 1)
    ends = starts[owners] + last_tokens + 1
    begins = np.zeros_like(ends)
    if kind.window is not None:
        begins = np.maximum(starts[owners] + firsts // kind.group + 1 - kind.window, 0)
    tiles_seen = -(-ends // shape.keys) - begins // shape.keys
    num_rows = int(num_new.sum())
    cut = splitting(tiles_seen.astype(np.int32), kind.kv_heads, _splits_in_memory(num_rows, kind), card)
    parts = -(-tiles_seen // cut.tiles_per_split)
    tile = np.repeat(np.arange(len(owners)), parts)
    split = np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)
    walked = np.minimum(tiles_seen[tile] - split * cut.tiles_per_split, cut.tiles_per_split)
    # The longest walks begin first: whatever begins last ends last, so let it be short.
    order = np.argsort(-walked, kind="stable")
    columns = [owners[tile] + first_span, firsts[tile], split, np.full_like(split, cut.tiles_per_split)]
    return Launch(shape, cut, np.stack(columns, axis=1)[order].astype(np.int32), spans[0].first_row, num_rows)


def refillable(spans: Sequence[Span], longest: int, kind: LayerKind, card: Card) -> Launch:
    """A step of decodes, cut as `launch` cuts it, in as many programs and splits whatever its lengths.

    longest: tokens that a sequence of any such step may have. Programs and splits follow from it and from
    the number of spans alone: what was launched for one step may be launched again for another's `tiles`.
    """
    own = launch(spans, 0, kind, tile_shape(kind.group, kind, card), card)
    num_tiles = len(spans) * -(-kind.group // own.shape.rows)
    widest = -(-longest // own.shape.keys)
    if kind.window is not None:  # which may begin inside a tile
        widest = min(widest, -(-kind.window // own.shape.keys) + 1)
    # A split is an even share of all walks at least, and those are shortest where all others are one tile.
    places = PROGRAMS_PER_PROCESSOR * card.processors
    most_splits = min(
        MOST_SPLITS,
        _splits_in_memory(own.num_rows, kind),
        -(-widest // FEWEST_TILES_PER_SPLIT),
        -(-widest * places // ((widest + num_tiles - 1) * kind.kv_heads)),
    )
    splits = max(1, most_splits) if widest >= 2 * FEWEST_TILES_PER_SPLIT else 1
    assert own.splitting.splits <= splits
    # As many whole shares as there are places, and of each tile a rest.
    programs = min(num_tiles * splits, num_tiles + places // kind.kv_heads)
    tiles = np.zeros((programs, own.tiles.shape[1]), dtype=np.int32)
    tiles[: len(own.tiles)] = own.tiles
    return replace(own, splitting=replace(own.splitting, splits=splits), tiles=tiles)


def _splits_in_memory(num_rows: int, kind: LayerKind) -> int:
    """Splits whose parts, one for each row, take no more than their share of memory; 0: not even one."""
    return MOST_PARTIAL_NUMBERS // (num_rows * kind.kv_heads * kind.group * kind.value_dim)


def launches(spans: Sequence[Span], num_decodes: int, kind: LayerKind, card: Card) -> list[Launch]:
    """All of a step: its decodes, then its prefills. spans: in row order, the first `num_decodes` decodes.

    Only two shapes for a kind of layer, whatever the lengths: each is compiled once.
    """
    made = []
    if num_decodes:
        made.append(launch(spans[:num_decodes], 0, kind, tile_shape(kind.group, kind, card), card))
    if num_decodes < len(spans):
        shape = tile_shape(MOST_ROWS, kind, card)
        made.append(launch(spans[num_decodes:], num_decodes, kind, shape, card))
    return made
