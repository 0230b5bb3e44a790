"""Random sequences, computed piece by piece in shared steps out of pages full of NaN, beside dense attention.

What every attention backend has to pass, on whatever device: each row of each step is held against a
naive float64 reference. The step's metadata is checked on the way.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import strategies as st

from cache.messages import SamplingParams
from cache.types import RequestId
from replica.attention.backend import AttentionBackend, AttentionCall
from replica.attention.kv_pages import LayerPages, LayerShape
from replica.attention.step_batch import StepBatch
from replica.scheduling.runner import ScheduledSequence

CPU = torch.device("cpu")
SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)
MAX_PIECES = 4

# Relative and absolute: what rounding the weights and the answer costs in each type.
TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1e-2, 1e-2)}


@dataclass(frozen=True, slots=True)
class Layer:
    """What one attention layer looks like."""

    kv_heads: int
    group: int  # query heads per K/V head
    key_dim: int
    value_dim: int
    window: int | None
    softcap: float | None
    has_sinks: bool

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence computed in pieces [cuts[i], cuts[i + 1]); `twin_of` gives it its first cuts[0] tokens."""

    cuts: tuple[int, ...]
    twin_of: int | None = None

    @property
    def length(self) -> int:
        return self.cuts[-1]


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    key_dim = draw(st.sampled_from([4, 8, 16]))
    return Layer(
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        key_dim=key_dim,
        value_dim=draw(st.sampled_from([key_dim, 4, 12])),
        window=draw(st.none() | st.integers(1, 40)),
        softcap=draw(st.none() | st.sampled_from([1.0, 20.0])),
        has_sinks=draw(st.booleans()),
    )


@st.composite
def batches(draw: st.DrawFn, max_sequences: int = 6) -> tuple[int, list[Sequence]]:
    """A block size, and sequences of which some start with full blocks of an earlier one."""
    block_size = draw(st.sampled_from([1, 2, 4, 7, 16]))
    sequences: list[Sequence] = []
    for _ in range(draw(st.integers(1, max_sequences))):
        twins = [index for index, other in enumerate(sequences) if other.length > block_size]
        twin_of = draw(st.none() | st.sampled_from(twins)) if twins else None
        if twin_of is None:
            pieces = draw(st.lists(st.integers(1, 30) | st.just(1), min_size=1, max_size=MAX_PIECES))
            cuts = [0]
            for piece in pieces:
                cuts.append(cuts[-1] + piece)
            sequences.append(Sequence(tuple(cuts)))
        else:
            # Computed in the very step in which its elder's last blocks are written.
            shared = draw(st.integers(1, sequences[twin_of].length // block_size)) * block_size
            sequences.append(Sequence((shared, shared + draw(st.integers(1, 20))), twin_of))
    return block_size, sequences


@dataclass(frozen=True, slots=True)
class Tensors:
    """One sequence's true query, key and value, float64, (heads, length, dim)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def draw_tensors(
    layer: Layer, sequences: list[Sequence], seed: int, dtype: torch.dtype = torch.float32
) -> list[Tensors]:
    """Numbers that `dtype` can hold."""
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, length: int, dim: int) -> torch.Tensor:
        return torch.randn(heads, length, dim, generator=generator).to(dtype).double()

    made: list[Tensors] = []
    for sequence in sequences:
        query = normal(layer.heads, sequence.length, layer.key_dim)
        key = normal(layer.kv_heads, sequence.length, layer.key_dim)
        value = normal(layer.kv_heads, sequence.length, layer.value_dim)
        if sequence.twin_of is not None:
            elder, shared = made[sequence.twin_of], sequence.cuts[0]
            key[:, :shared], value[:, :shared] = elder.key[:, :shared], elder.value[:, :shared]
        made.append(Tensors(query, key, value))
    return made


def dense(layer: Layer, tensors: Tensors, sinks: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Attention of one whole sequence by the book, one row at a time: (length, heads, value_dim)."""
    length = tensors.query.shape[1]
    out = torch.zeros(length, layer.heads, layer.value_dim, dtype=torch.float64)
    for head in range(layer.heads):
        key, value = tensors.key[head // layer.group], tensors.value[head // layer.group]
        for row in range(length):
            first = 0 if layer.window is None else max(0, row + 1 - layer.window)
            scores = key[first : row + 1] @ tensors.query[head, row] * scale
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            weights = scores.softmax(0)[: row + 1 - first]
            out[row, head] = weights @ value[first : row + 1]
    return out


def block_tables(block_size: int, sequences: list[Sequence], seed: int) -> tuple[int, list[list[int]]]:
    """Blocks in no order; a twin's table starts with its elder's."""
    needed = [-(-sequence.length // block_size) for sequence in sequences]
    shuffled = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    tables: list[list[int]] = []
    for sequence, count in zip(sequences, needed, strict=True):
        shared = sequence.cuts[0] // block_size if sequence.twin_of is not None else 0
        table = tables[sequence.twin_of][:shared] if sequence.twin_of is not None else []
        tables.append(table + [shuffled.pop() for _ in range(count - shared)])
    return sum(needed) + 3, tables


def steps(sequences: list[Sequence]) -> list[list[tuple[int, int, int]]]:
    """Per step the pieces (sequence, start, stop); everyone's last piece is in the last step."""
    planned: list[list[tuple[int, int, int]]] = [[] for _ in range(max(len(s.cuts) for s in sequences) - 1)]
    for index, sequence in enumerate(sequences):
        pieces = list(pairwise(sequence.cuts))
        for step, (start, stop) in zip(planned[-len(pieces) :], pieces, strict=True):
            step.append((index, start, stop))
    return planned


def scheduled(sequence: Sequence, index: int, table: list[int], start: int, stop: int) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=RequestId(f"s{index}"),
        token_ids=array("i", [index * 1000 + position for position in range(sequence.length)]),
        block_table=table,
        start=start,
        num_new_tokens=stop - start,
        num_prompt_tokens=sequence.length,
        sampling=SAMPLING,
        seed=0,
    )


def check_metadata(
    batch: StepBatch, items: list[ScheduledSequence], window: int | None, block_size: int
) -> list[tuple[int, int]]:
    """Rows against a naive reading of the same step; (item, position) of each row."""
    rows = [
        (index, position)
        for index in batch.order
        for position in range(items[index].start, items[index].start + items[index].num_new_tokens)
    ]
    assert sorted(batch.order) == list(range(len(items)))
    assert batch.input_ids[0].tolist() == [items[index].token_ids[position] for index, position in rows]
    assert batch.positions[0].tolist() == [position for _, position in rows]
    assert batch.slots.tolist() == [
        items[index].block_table[position // block_size] * block_size + position % block_size
        for index, position in rows
    ]
    ends = [row for row, (index, _) in enumerate(rows) if row + 1 == len(rows) or rows[row + 1][0] != index]
    assert batch.last_rows.tolist() == ends
    groups = [range(g.first_row, g.first_row + g.size) for g in batch.decode_groups(window)]
    pieces = [range(p.first_row, p.first_row + p.num_tokens) for p in batch.prefill_pieces(window)]
    covered = [row for part in (*groups, *pieces) for row in part]
    assert covered == list(range(len(rows))), "each row is attended exactly once"
    assert sum(map(len, groups)) == sum(item.num_new_tokens == 1 for item in items)
    return rows


def empty_pages(
    layer: Layer,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> LayerPages:
    """Pages full of NaN: what an earlier request's failed step may have left."""
    shape = LayerShape(layer.kv_heads, layer.key_dim, layer.value_dim)
    pages = LayerPages(None, shape, num_blocks, block_size, dtype, device)  # type: ignore[arg-type]
    pages.keys.fill_(float("nan"))
    pages.values.fill_(float("nan"))
    return pages


def check(
    layer: Layer,
    block_size: int,
    sequences: list[Sequence],
    seed: int,
    backend: AttentionBackend,
    pages: LayerPages | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> None:
    """Compute the sequences in steps and hold every row against the book."""
    tensors = draw_tensors(layer, sequences, seed, dtype)
    scale = layer.key_dim**-0.5
    sinks = (
        torch.randn(layer.heads, generator=torch.Generator().manual_seed(seed)) if layer.has_sinks else None
    )
    wanted = [dense(layer, each, sinks, scale) for each in tensors]
    num_blocks, tables = block_tables(block_size, sequences, seed if pages is None else 0)
    pages = pages or empty_pages(layer, num_blocks, block_size, dtype, device)
    on_device_sinks = None if sinks is None else sinks.to(device)
    for step in steps(sequences):
        items = [scheduled(sequences[i], i, tables[i], start, stop) for i, start, stop in step]
        batch = StepBatch(items, block_size, device, dtype)
        rows = check_metadata(batch, items, layer.window, block_size)
        at = [(step[index][0], position) for index, position in rows]
        call = AttentionCall(
            query=torch.stack([tensors[i].query[:, p] for i, p in at], dim=1).to(device, dtype),
            key=torch.stack([tensors[i].key[:, p] for i, p in at], dim=1).to(device, dtype),
            value=torch.stack([tensors[i].value[:, p] for i, p in at], dim=1).to(device, dtype),
            scale=scale,
            window=layer.window,
            softcap=layer.softcap,
            sinks=on_device_sinks,
        )
        pages.write(batch, call.key.transpose(0, 1), call.value.transpose(0, 1))
        before = pages.keys.clone(), pages.values.clone()
        got = backend.attend(pages, batch, call)
        right = torch.stack([wanted[i][p] for i, p in at])
        relative, absolute = TOLERANCES[dtype]
        assert got.dtype == dtype
        torch.testing.assert_close(got.cpu().double(), right, rtol=relative, atol=absolute)
        assert all(
            torch.equal(now.nan_to_num(7e7), then.nan_to_num(7e7))
            for now, then in zip((pages.keys, pages.values), before, strict=True)
        ), "attending changed the pages"
