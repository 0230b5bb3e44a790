"""The backend's routes against dense attention, on cases small enough to read.

Random shapes and schedules are `tests/property/test_paged_attention.py`'s; here each route is named.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from replica.attention import gather_sdpa, wide_decode
from replica.attention.backend import AttentionCall
from replica.attention.cpu_flash import CpuFlash
from replica.attention.gather_sdpa import GatherSdpa
from replica.attention.kv_pages import LayerPages
from replica.scheduling.runner import ScheduledSequence
from tests.fakes.steps import CPU, layer_pages, scheduled, step

HEADS, KV_HEADS, DIM = 6, 2, 8


def call(num_tokens: int, **options: object) -> AttentionCall:
    torch.manual_seed(num_tokens)
    made = AttentionCall(
        query=torch.randn(HEADS, num_tokens, DIM),
        key=torch.randn(KV_HEADS, num_tokens, DIM),
        value=torch.randn(KV_HEADS, num_tokens, DIM),
        scale=0.3,
        window=None,
        softcap=None,
        sinks=None,
    )
    return replace(made, **options)  # type: ignore[arg-type]


def dense(given: AttentionCall, first_row: int) -> torch.Tensor:
    """Rows from `first_row` on of one whole sequence's attention, by the book: (rows, heads, dim)."""
    length = given.query.shape[1]
    group = HEADS // KV_HEADS
    key, value = (part.repeat_interleave(group, dim=0) for part in (given.key, given.value))
    scores = given.query @ key.transpose(1, 2) * given.scale
    if given.softcap is not None:
        scores = given.softcap * torch.tanh(scores / given.softcap)
    queries, keys = torch.arange(length)[:, None], torch.arange(length)[None]
    hidden = keys > queries
    if given.window is not None:
        hidden |= keys <= queries - given.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if given.sinks is not None:
        scores = torch.cat([scores, given.sinks[:, None, None].expand(HEADS, length, 1)], dim=2)
    return (scores.softmax(2)[:, :, :length] @ value).transpose(0, 1)[first_row:]


def attend_in_pieces(
    backend: GatherSdpa, pages: LayerPages, whole: AttentionCall, table: list[int], cuts: list[int]
) -> torch.Tensor:
    """The whole sequence computed piece by piece: (tokens, heads, dim)."""
    parts = []
    for start, stop in pairwise(cuts):
        sequence: ScheduledSequence = scheduled("s", table, start, stop - start)
        batch = step(sequence)
        part = replace(
            whole,
            query=whole.query[:, start:stop],
            key=whole.key[:, start:stop],
            value=whole.value[:, start:stop],
        )
        pages.write(batch, part.key.transpose(0, 1), part.value.transpose(0, 1))
        parts.append(backend.attend(pages, batch, part).clone())
    return torch.cat(parts)


@pytest.mark.parametrize(
    "cuts",
    [
        [0, 19],  # no context
        [0, 7, 19],  # context that ends inside a block
        [0, 8, 16, 19],  # context that ends with one
        [0, 17, 18, 19],  # decodes
        [0, 12, 13, 14, 15, 16, 17, 18, 19],  # decodes that keep what they gathered
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 5},
        {"softcap": 2.0},
        {"sinks": torch.linspace(-1, 1, HEADS)},
        {"window": 5, "softcap": 2.0, "sinks": torch.linspace(-1, 1, HEADS)},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize("has_flash", [True, False], ids=["two parts", "one part with bias"])
@pytest.mark.parametrize("is_wide", [True, False], ids=["wide", "narrow"])
def test_every_route_is_dense_attention(
    cuts: list[int],
    options: dict[str, object],
    has_flash: bool,
    is_wide: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_wide:
        monkeypatch.setattr(wide_decode, "FEWEST_ELEMENTS", 0)
    if not has_flash:
        monkeypatch.setattr(CpuFlash, "find", lambda device: None)
    whole = call(19, **options)
    table = [9, 3, 14, 0, 7]
    got = attend_in_pieces(GatherSdpa(CPU), layer_pages(), whole, table, cuts)
    torch.testing.assert_close(got, dense(whole, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("device", "expected"), [("cpu", True), ("cuda", False)])
def test_on_a_card_no_kernel_is_asked_that_makes_a_plan_for_every_length(
    device: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every route to SDPA: without context, with a bias, a decode."""
    asked = []

    def sdpa(*args: Any, **options: Any) -> torch.Tensor:
        asked.append(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
        return scaled_dot_product_attention(*args, **options)

    monkeypatch.setattr(CpuFlash, "find", lambda device: None)
    monkeypatch.setattr(gather_sdpa, "scaled_dot_product_attention", sdpa)
    whole, backend = call(19), GatherSdpa(torch.device(device))
    got = attend_in_pieces(backend, layer_pages(), whole, [9, 3, 14, 0, 7], [0, 7, 18, 19])
    assert asked == [expected] * 3
    assert torch.backends.cuda.cudnn_sdp_enabled(), "it is others' setting, too"  # type: ignore[no-untyped-call]
    torch.testing.assert_close(got, dense(whole, 0), rtol=1e-5, atol=1e-5)


def test_the_explicit_formula_is_tiled_to_bound_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = call(19, softcap=2.0)
    largest = 0
    true_matmul = torch.matmul

    def watched(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        product = true_matmul(left, right)
        if product.shape[-1] >= 19:
            largest = max(largest, product.numel())
        return product

    monkeypatch.setattr(gather_sdpa, "MAX_EXPLICIT_SCORES", HEADS * 19 * 2)
    monkeypatch.setattr(torch, "matmul", watched)
    got = attend_in_pieces(GatherSdpa(CPU), layer_pages(), whole, [0, 1, 2, 3, 4], [0, 19])
    monkeypatch.undo()
    torch.testing.assert_close(got, dense(whole, 0), rtol=1e-5, atol=1e-5)
    assert 0 < largest <= HEADS * 19 * 2


def test_closing_gives_all_memory_back() -> None:
    """Pages, scratch and what decodes kept: nothing may outlive the runner."""
    backend, pages = GatherSdpa(CPU), layer_pages()
    attend_in_pieces(backend, pages, call(9), [1, 2, 3], [0, 4, 5, 6, 7, 8, 9])
    kept = [weakref.ref(each.keys.memory) for each in backend._resident._kept.values()]
    assert len(kept) == 1
    backend.close()
    backend.close()
    gc.collect()
    assert not backend._scratch
    assert all(memory() is None for memory in kept)


def test_scratch_memory_is_reused_and_grows_by_doubling() -> None:
    """A fresh buffer per layer and step is mapped and unmapped by the system each time."""
    backend, pages = GatherSdpa(CPU), layer_pages(num_blocks=200)
    first, _ = backend._gather(pages, torch.arange(3))
    again, _ = backend._gather(pages, torch.arange(64))
    assert first.data_ptr() == again.data_ptr()
    larger, _ = backend._gather(pages, torch.arange(65))
    assert larger.data_ptr() != again.data_ptr()
    most, _ = backend._gather(pages, torch.arange(128))
    assert most.data_ptr() == larger.data_ptr()
