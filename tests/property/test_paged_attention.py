"""Attention over pages equals dense attention over each sequence alone, whatever is packed together.

Random sequences are computed piece by piece, all in shared steps, out of pages full of NaN; every
row of every step is held against a naive float64 reference. The step's metadata is checked on the way.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.messages import SamplingParams
from cache.types import RequestId
from replica.attention import gather_sdpa, step_batch, wide_decode
from replica.attention.backend import AttentionCall
from replica.attention.gather_sdpa import GatherSdpa
from replica.attention.kv_pages import LayerPages, LayerShape
from replica.attention.step_batch import StepBatch
from replica.scheduling.runner import ScheduledSequence

CPU = torch.device("cpu")
SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)
MAX_PIECES = 4


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
def batches(draw: st.DrawFn) -> tuple[int, list[Sequence]]:
    """A block size, and sequences of which some start with full blocks of an earlier one."""
    block_size = draw(st.sampled_from([1, 2, 4, 7, 16]))
    sequences: list[Sequence] = []
    for _ in range(draw(st.integers(1, 6))):
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


def draw_tensors(layer: Layer, sequences: list[Sequence], seed: int) -> list[Tensors]:
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, length: int, dim: int) -> torch.Tensor:
        return torch.randn(heads, length, dim, generator=generator, dtype=torch.float64)

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


def empty_pages(layer: Layer, num_blocks: int, block_size: int) -> LayerPages:
    """Pages full of NaN: what an earlier request's failed step may have left."""
    shape = LayerShape(layer.kv_heads, layer.key_dim, layer.value_dim)
    pages = LayerPages(None, shape, num_blocks, block_size, torch.float32, CPU)  # type: ignore[arg-type]
    pages.keys.fill_(float("nan"))
    pages.values.fill_(float("nan"))
    return pages


def check(
    layer: Layer,
    block_size: int,
    sequences: list[Sequence],
    seed: int,
    backend: GatherSdpa,
    pages: LayerPages | None = None,
) -> None:
    tensors = draw_tensors(layer, sequences, seed)
    scale = layer.key_dim**-0.5
    sinks = (
        torch.randn(layer.heads, generator=torch.Generator().manual_seed(seed)) if layer.has_sinks else None
    )
    wanted = [dense(layer, each, sinks, scale) for each in tensors]
    num_blocks, tables = block_tables(block_size, sequences, seed if pages is None else 0)
    pages = pages or empty_pages(layer, num_blocks, block_size)
    for step in steps(sequences):
        items = [scheduled(sequences[i], i, tables[i], start, stop) for i, start, stop in step]
        batch = StepBatch(items, block_size, CPU, torch.float32)
        rows = check_metadata(batch, items, layer.window, block_size)
        at = [(step[index][0], position) for index, position in rows]
        call = AttentionCall(
            query=torch.stack([tensors[i].query[:, p] for i, p in at], dim=1).float(),
            key=torch.stack([tensors[i].key[:, p] for i, p in at], dim=1).float(),
            value=torch.stack([tensors[i].value[:, p] for i, p in at], dim=1).float(),
            scale=scale,
            window=layer.window,
            softcap=layer.softcap,
            sinks=sinks,
        )
        pages.write(batch, call.key.transpose(0, 1), call.value.transpose(0, 1))
        before = pages.keys.clone(), pages.values.clone()
        got = backend.attend(pages, batch, call)
        right = torch.stack([wanted[i][p] for i, p in at])
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-5)
        assert all(
            torch.equal(now.nan_to_num(7e7), then.nan_to_num(7e7))
            for now, then in zip((pages.keys, pages.values), before, strict=True)
        ), "attending changed the pages"


@given(
    layer=layers(),
    batch=batches(),
    seed=st.integers(0, 1000),
    has_flash=st.booleans(),
    group_tokens=st.sampled_from([8, 64, 1 << 15]),
    short_blocks=st.sampled_from([1, 8]),
    max_scores=st.sampled_from([64, 1 << 26]),
)
@settings(max_examples=80)
def test_paged_attention_is_dense_attention(
    layer: Layer,
    batch: tuple[int, list[Sequence]],
    seed: int,
    has_flash: bool,
    group_tokens: int,
    short_blocks: int,
    max_scores: int,
) -> None:
    """With and without the kernel that returns its log-sum-exp; limits small enough to be reached."""
    block_size, sequences = batch
    backend = GatherSdpa(CPU)
    if not has_flash:
        backend._flash = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_batch, "MAX_GROUP_TOKENS", group_tokens)
        patch.setattr(step_batch, "SHORT_BLOCKS", short_blocks)
        patch.setattr(gather_sdpa, "MAX_EXPLICIT_SCORES", max_scores)
        check(layer, block_size, sequences, seed, backend)


@pytest.mark.long
@given(layer=layers(), batch=batches(), seed=st.integers(0, 10**6), has_flash=st.booleans())
@settings(max_examples=1500)
def test_paged_attention_is_dense_attention_in_many_more_shapes(
    layer: Layer, batch: tuple[int, list[Sequence]], seed: int, has_flash: bool
) -> None:
    block_size, sequences = batch
    backend = GatherSdpa(CPU)
    if not has_flash:
        backend._flash = None
    check(layer, block_size, sequences, seed, backend)


def test_one_backend_serves_layers_of_different_shapes_in_turn() -> None:
    """Its scratch memory is reused between layers and steps, and grows with the context."""
    backend = GatherSdpa(CPU)
    plain = Layer(2, 2, 8, 8, None, None, False)
    wide = Layer(1, 4, 16, 4, 9, None, True)
    for length in (5, 60, 300, 20):
        for layer in (plain, wide):
            check(
                layer, 4, [Sequence((0, length, length + 1)), Sequence((0, length // 2, length))], 3, backend
            )


@pytest.mark.parametrize("window", [None, 3])
def test_many_decodes_of_very_different_lengths(window: int | None) -> None:
    """Padding to the longest would cost thousands of slots for the shortest: they are grouped by length."""
    lengths = [1, 2, 3, 5, 8, 40, 41, 90, 200, 201]
    sequences = [Sequence((0, length, length + 1)) for length in lengths]
    check(Layer(2, 2, 8, 8, window, None, False), 4, sequences, 5, GatherSdpa(CPU))


@given(
    batch=batches(),
    seed=st.integers(0, 1000),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([4, 8, 16]),
    has_flash=st.booleans(),
)
@settings(max_examples=40)
def test_a_plain_layer_by_every_route(
    batch: tuple[int, list[Sequence]], seed: int, kv_heads: int, group: int, dim: int, has_flash: bool
) -> None:
    """No window, softcap or sinks, as in most models: context and new tokens apart, or with a causal bias."""
    backend = GatherSdpa(CPU)
    if not has_flash:
        backend._flash = None
    check(Layer(kv_heads, group, dim, dim, None, None, False), *batch, seed, backend)


def decoding(prompt: int, num_decodes: int) -> Sequence:
    return Sequence((0, *range(prompt, prompt + num_decodes + 1)))


@given(
    layer=layers(),
    block_size=st.sampled_from([1, 4, 16]),
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12)), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    is_wide=st.booleans(),
)
@settings(max_examples=60)
def test_many_steps_of_decoding_while_others_join(
    layer: Layer, block_size: int, shapes: list[tuple[int, int]], seed: int, is_wide: bool
) -> None:
    """Whatever a backend keeps from one step to the next: members come, blocks are opened, windows move."""
    with pytest.MonkeyPatch.context() as patch:
        if is_wide:  # as large batches are computed
            patch.setattr(wide_decode, "FEWEST_ELEMENTS", 0)
        check(layer, block_size, [decoding(*shape) for shape in shapes], seed, GatherSdpa(CPU))


@pytest.mark.parametrize("window", [None, 9])
def test_the_same_request_ids_and_blocks_come_back_with_other_contents(window: int | None) -> None:
    """A client repeats a request id; another engine starts over the same runner."""
    layer, backend = Layer(2, 2, 8, 8, window, None, False), GatherSdpa(CPU)
    pages = empty_pages(layer, num_blocks=6, block_size=4)
    check(layer, 4, [decoding(5, 6)], 1, backend, pages)
    # Prefilled to where the decodes above ended, in the same blocks: its next token continues nothing.
    check(layer, 4, [Sequence((0, 11, 12))], 2, backend, pages)
    check(layer, 4, [decoding(5, 6)], 3, backend, pages)
    check(layer, 4, [Sequence((0, 4, 11, 12))], 4, backend, pages)


def test_the_kernel_that_returns_its_log_sum_exp_is_found_where_torch_has_it() -> None:
    """Its trial once asked for a scale of 0, got NaN, and so the faster of two routes was never taken."""
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        pytest.skip("this torch has no such kernel")
    assert GatherSdpa(CPU)._flash is not None
