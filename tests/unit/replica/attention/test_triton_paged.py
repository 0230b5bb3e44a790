"""The Triton kernels, each route on a case small enough to read, in Triton's interpreter.

Random shapes and schedules are `tests/property/test_triton_attention.py`'s, real cards `tests/gpu`'s.
That the kernels compile, and fit the cards they are for, needs no card.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from replica.attention import tiling
from replica.attention.backend import AttentionCall
from replica.attention.gather_sdpa import GatherSdpa
from replica.attention.kv_pages import LayerPages
from replica.attention.step_batch import StepBatch
from replica.attention.tiling import Card
from replica.attention.triton_paged import INTERPRETED_CARD, TritonPaged, card_of
from tests.attention_cases import CPU, Layer, Sequence, check, empty_pages
from tests.compiled_kernels import compiled
from tests.fakes.recording import KernelRecorder
from tests.fakes.steps import scheduled, step
from tests.triton_interpreter import needs_triton

pytestmark = needs_triton

SMALL_TILES = Card(processors=1, shared_bytes=1)  # 16 by 16
PLAIN = Layer(kv_heads=1, group=2, key_dim=8, value_dim=8, window=None, softcap=None, has_sinks=False)
EVERYTHING = replace(PLAIN, value_dim=12, window=19, softcap=2.0, has_sinks=True)


def splitting_card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """Every tile of keys is a split of its own."""
    monkeypatch.setattr(tiling, "FEWEST_TILES_PER_SPLIT", 1)
    return Card(processors=1000, shared_bytes=1)


@pytest.mark.parametrize("layer", [PLAIN, EVERYTHING], ids=["plain", "window+softcap+sinks"])
@pytest.mark.parametrize(
    "sequences",
    [
        [Sequence((0, 37))],  # no context; three tiles of keys, the last one partly filled
        [Sequence((0, 32, 48))],  # context and new tokens are whole tiles
        [Sequence((0, 33, 34))],  # a decode
        [
            Sequence((0, 35, 45)),
            Sequence((0, 50, 51)),
            Sequence((0, 3, 4)),
            Sequence((0, 9)),
        ],  # all in one step
    ],
    ids=["prefill", "prefill after a prefix", "decode", "mixed"],
)
def test_each_route_is_dense_attention(layer: Layer, sequences: list[Sequence]) -> None:
    check(layer, 16, sequences, 1, TritonPaged(CPU, SMALL_TILES))


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(PLAIN, id="plain", marks=(pytest.mark.long, pytest.mark.broad)),
        pytest.param(EVERYTHING, id="window+softcap+sinks"),
    ],
)
def test_splits_are_merged_by_what_each_of_them_saw(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some parts see no key of a row: behind its window, or after the row itself."""
    sequences = [Sequence((0, 60, 64)), Sequence((0, 50, 51)), Sequence((0, 4, 5))]
    check(layer, 16, sequences, 2, TritonPaged(CPU, splitting_card(monkeypatch)))


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, pytest.param(torch.bfloat16, marks=(pytest.mark.long, pytest.mark.broad))],
    ids=str,
)
def test_half_precision_accumulates_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [Sequence((0, 40, 44)), Sequence((0, 33, 34))]
    check(PLAIN, 16, sequences, 3, TritonPaged(CPU, SMALL_TILES), dtype=dtype)
    check(EVERYTHING, 16, sequences, 3, TritonPaged(CPU, splitting_card(monkeypatch)), dtype=dtype)


@pytest.mark.parametrize("block_size", [1, 7, 16, 48])
def test_any_block_size_will_do(block_size: int) -> None:
    """A tile of keys may lie in many blocks, and a block in many tiles."""
    check(PLAIN, block_size, [Sequence((0, 50, 51)), Sequence((0, 20))], 4, TritonPaged(CPU, SMALL_TILES))


@pytest.mark.parametrize(
    "layer",
    [
        replace(PLAIN, group=7),  # a token's query heads lie in two tiles
        replace(PLAIN, group=20),  # and need more than one
        replace(PLAIN, kv_heads=3, group=1),
        replace(PLAIN, key_dim=48, value_dim=32),  # as latent attention has them
    ],
    ids=["7 heads share", "20 heads share", "nobody shares", "keys wider than values"],
)
def test_any_shape_of_heads_will_do(layer: Layer) -> None:
    check(layer, 16, [Sequence((0, 17, 20)), Sequence((0, 18, 19))], 5, TritonPaged(CPU, SMALL_TILES))


def test_the_widest_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    widest = replace(PLAIN, group=1, key_dim=256, value_dim=256)
    check(widest, 16, [Sequence((0, 40, 41))], 6, TritonPaged(CPU, splitting_card(monkeypatch)))


def test_what_lies_behind_the_window_or_after_the_end_is_never_read() -> None:
    """Blocks out of sight may hold another's failed step, and 0 * NaN is NaN."""
    layer = replace(PLAIN, window=5)
    pages = empty_pages(layer, num_blocks=16, block_size=4)
    batch = step(scheduled("a", [3, 9, 1, 4, 7], 18, 2), scheduled("b", [2, 8, 5, 6], 13, 1))
    pages.keys[[1, 4, 7, 8, 5, 6]] = 0.5  # what either may still see; the rest stays NaN
    pages.values[[1, 4, 7, 8, 5, 6]] = 0.5
    call = AttentionCall(
        query=torch.ones(2, 3, 8), key=torch.ones(1, 3, 8), value=torch.ones(1, 3, 8),
        scale=0.3, window=5, softcap=None, sinks=None,
    )  # fmt: skip
    pages.write(batch, call.key.transpose(0, 1), call.value.transpose(0, 1))
    assert TritonPaged(CPU, SMALL_TILES).attend(pages, batch, call).isfinite().all()


def test_one_backend_serves_layers_of_different_kinds_in_turn() -> None:
    """What is shared within a step is per kind of layer: windows differ, and so do group sizes."""
    backend, sdpa = TritonPaged(CPU, SMALL_TILES), GatherSdpa(CPU)
    batch = step(scheduled("a", [0, 1, 2, 3, 4, 5], 20, 3), scheduled("b", [6, 7, 8, 9], 12, 1))
    torch.manual_seed(0)
    for kv_heads, window in ((2, None), (1, 9), (2, 9), (2, None)):
        layer = replace(PLAIN, kv_heads=kv_heads)
        pages = empty_pages(layer, num_blocks=10, block_size=4)
        pages.keys.normal_()
        pages.values.normal_()
        call = AttentionCall(
            query=torch.randn(4, 4, 8).transpose(0, 1),  # token by token, as projections leave it
            key=torch.randn(kv_heads, 4, 8),
            value=torch.randn(kv_heads, 4, 8),
            scale=0.3,
            window=window,
            softcap=None,
            sinks=None,
        )
        pages.write(batch, call.key.transpose(0, 1), call.value.transpose(0, 1))
        torch.testing.assert_close(backend.attend(pages, batch, call), sdpa.attend(pages, batch, call))
    backend.close()
    backend.close()


HELD_TOKENS, HELD_BLOCK = 96, 16  # per sequence of a held step; 6 tiles of 16 keys


def held_call(pages: LayerPages, layer: Layer, num_rows: int) -> AttentionCall:
    """Queries for as many decodes; K and V are in the pages already."""
    return AttentionCall(
        query=torch.randn(num_rows, layer.heads, layer.key_dim).transpose(0, 1),
        key=torch.zeros(layer.kv_heads, num_rows, layer.key_dim),
        value=torch.zeros(layer.kv_heads, num_rows, layer.value_dim),
        scale=0.3,
        window=layer.window,
        softcap=layer.softcap,
        sinks=torch.randn(layer.heads) if layer.has_sinks else None,
    )


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(PLAIN, id="plain", marks=(pytest.mark.long, pytest.mark.broad)),
        pytest.param(replace(EVERYTHING, kv_heads=2, window=35), id="window+softcap+sinks"),
        # Two tiles of rows for each sequence.
        pytest.param(replace(PLAIN, group=20, has_sinks=True), id="20 heads share"),
    ],
)
def test_a_recorded_step_is_cut_for_whoever_is_in_it(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are replayed as they were made, over other lengths: equal, mixed, and all short."""
    torch.manual_seed(0)
    card = replace(splitting_card(monkeypatch), processors=6)
    recorder = KernelRecorder()
    backend, plain = TritonPaged(CPU, card), TritonPaged(CPU, card)
    monkeypatch.setattr(backend, "_kernels", recorder.over(backend._kernels, "attend", "merge"))
    per_row = HELD_TOKENS // HELD_BLOCK
    pages = empty_pages(layer, num_blocks=4 * per_row, block_size=HELD_BLOCK)
    pages.keys.normal_()
    pages.values.normal_()
    tables = [list(range(row * per_row, (row + 1) * per_row)) for row in range(4)]

    def batch_of(lengths: list[int]) -> StepBatch:
        items = [
            scheduled(f"s{row}", tables[row], length - 1, 1, HELD_TOKENS)
            for row, length in enumerate(lengths)
        ]
        return StepBatch(items, HELD_BLOCK, CPU, torch.float32)

    held = batch_of([HELD_TOKENS] * 4)
    step = backend.hold(held)
    step.refill(batch_of([1] * 4).sequences)
    call = held_call(pages, layer, 4)
    out = torch.empty(4, layer.heads, layer.value_dim)
    replay = recorder.record(lambda: void(out.copy_(backend.attend(pages, held, call))))
    num_launches = recorder.num_launches
    for lengths in ([HELD_TOKENS] * 4, [2, 17, 40, HELD_TOKENS], [1, 1, 1, 65], [1, 2, 3, 4]):
        batch = batch_of(lengths)  # in row order already: by length
        step.refill(batch.sequences)
        replay()
        torch.testing.assert_close(out, plain.attend(pages, batch, call))
    assert recorder.num_launches == num_launches == 2 * 2, "the kernel and its merge, twice while recorded"


def void(_: object) -> None:
    """For work that returns nothing."""


def test_a_device_says_how_attention_is_cut_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        multi_processor_count = 132
        shared_memory_per_block_optin = 232_448

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    assert card_of(torch.device("cuda", 0)) == Card(processors=132, shared_bytes=232_448)
    assert card_of(CPU) == INTERPRETED_CARD


LLAMA_8B = {"kv_heads": 8, "group": 4, "key_dim": 128, "value_dim": 128, "window": None, "itemsize": 2}
# What a program may have of shared memory, by compute capability.
MOST_SHARED = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}


def test_kernels_compile_for_a_card_and_fit_it(tmp_path: Path) -> None:
    """The interpreter takes what the compiler refuses: a name with another type in each branch, for one."""
    prefill, decode = compiled(
        tmp_path,
        {"arch": 90, "most_rows": 128, "kind": LLAMA_8B},
        {"arch": 90, "most_rows": 4, "kind": LLAMA_8B, "merges": True},
    )
    assert max(prefill["shared"], decode["shared"]) <= MOST_SHARED[90]
    assert prefill["spilled"] == decode["spilled"] == 0
    # K and V of the next tile are under way while one is computed. Block ids that are loaded in the iteration
    # that needs them took a stage, and every tile waited for the table and then for K and V.
    assert min(prefill["ahead"], decode["ahead"]) >= 2
    assert min(prefill["buffers"], decode["buffers"]) >= 2
    # Two decodes fit a processor, of 65,536 registers and 228 KiB: `PROGRAMS_PER_PROCESSOR`.
    assert 2 * 128 * decode["registers"] <= 1 << 16
    assert 2 * (decode["shared"] + 1024) <= 228 << 10


@pytest.mark.long
@pytest.mark.broad
@pytest.mark.timeout(600)
def test_every_kind_of_layer_compiles_for_three_generations(tmp_path: Path) -> None:
    gemma = {**LLAMA_8B, "group": 2, "key_dim": 256, "value_dim": 256, "window": 4096}
    gpt_oss = {**LLAMA_8B, "group": 8, "key_dim": 64, "value_dim": 64, "window": 128}
    latent = {**LLAMA_8B, "kv_heads": 16, "group": 1, "key_dim": 192}
    layers: list[dict[str, Any]] = [
        {"kind": gemma, "has_cap": True},  # the largest heads: what is short of memory is short of it here
        {"kind": LLAMA_8B},
        {"kind": gpt_oss, "has_sinks": True, "merges": True},
        {"kind": latent},
        {"kind": {**LLAMA_8B, "itemsize": 4}},
    ]
    most = {80: layers[:1], 86: layers[:2], 90: layers}
    cases = [
        {"arch": arch, "most_rows": rows, **layer}
        for arch in MOST_SHARED
        for rows in (4, 128)
        for layer in most[arch]
    ]
    for case, answer in zip(cases, compiled(tmp_path, *cases), strict=True):
        arch = case["arch"]
        assert isinstance(arch, int)
        assert answer["shared"] <= MOST_SHARED[arch], case
        # Cards with 99 KiB have room for two stages only, unless heads are narrow.
        assert arch == 86 or answer["ahead"] > 0, case
        # The widest heads leave the fewest registers.
        assert arch != 90 or case["kind"]["itemsize"] == 4 or answer["spilled"] == 0, case
