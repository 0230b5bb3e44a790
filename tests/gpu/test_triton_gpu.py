"""The Triton kernels compiled and run on a card: the cases of the interpreter's tests, larger, in every type.

`make test-gpu`. Skipped in a process that interprets Triton's kernels: nothing of the card would be tried.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.attention import tiling, triton_paged
from replica.attention.backend import AttentionCall, choose_backend
from replica.attention.gather_sdpa import GatherSdpa
from replica.attention.kv_pages import LayerShape
from replica.attention.step_batch import StepBatch
from replica.attention.tiling import Card
from replica.attention.triton_paged import TritonPaged
from tests.attention_cases import Layer, Sequence, batches, check, empty_pages, layers
from tests.fakes.steps import scheduled

SHAPE = LayerShape(2, 64, 64)


def _why_skipped() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device here"
    return triton_paged.why_not(torch.device("cuda", 0), torch.float32, [SHAPE])


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_why_skipped() is not None, reason=str(_why_skipped()))]

CUDA = torch.device("cuda", 0)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The card's own tiles; and tiny ones, every tile of keys a split of its own.
CARDS = {"its own": None, "split": Card(processors=1000, shared_bytes=1)}
LLAMA_LIKE = Layer(
    kv_heads=2, group=4, key_dim=128, value_dim=128, window=None, softcap=None, has_sinks=False
)
EVERYTHING = replace(LLAMA_LIKE, group=7, key_dim=192, window=100, softcap=20.0, has_sinks=True)
MIXED = [Sequence((0, 150, 200, 290)), Sequence((0, 257, 258, 259)), Sequence((0, 64)), Sequence((0, 1, 2))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("layer", [LLAMA_LIKE, EVERYTHING], ids=["plain", "everything"])
def test_each_route_is_dense_attention(
    layer: Layer, card: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiling, "FEWEST_TILES_PER_SPLIT", 1)
    check(layer, 16, MIXED, 1, TritonPaged(CUDA, CARDS[card]), dtype=dtype, device=CUDA)


@given(layer=layers(), batch=batches(), seed=st.integers(0, 10**6), dtype=st.sampled_from(DTYPES))
@settings(max_examples=40)
def test_kernels_compute_dense_attention(
    layer: Layer, batch: tuple[int, list[Sequence]], seed: int, dtype: torch.dtype
) -> None:
    block_size, sequences = batch
    check(layer, block_size, sequences, seed, TritonPaged(CUDA), dtype=dtype, device=CUDA)


@pytest.mark.parametrize("num_new", [1, 512])
def test_a_long_context_is_what_sdpa_makes_of_it(num_new: int) -> None:
    """16,384 tokens: a decode is split over the card, and so may a chunk be."""
    torch.manual_seed(0)
    start, dtype = 16_384 - num_new, torch.bfloat16
    pages = empty_pages(LLAMA_LIKE, 1024, 16, dtype, CUDA)
    pages.keys.normal_()
    pages.values.normal_()
    item = scheduled("long", torch.randperm(1024).tolist(), start, num_new)
    batch = StepBatch([item], 16, CUDA, dtype)
    call = AttentionCall(
        query=torch.randn(8, num_new, 128, device=CUDA, dtype=dtype),
        key=torch.randn(2, num_new, 128, device=CUDA, dtype=dtype),
        value=torch.randn(2, num_new, 128, device=CUDA, dtype=dtype),
        scale=128**-0.5,
        window=None,
        softcap=None,
        sinks=None,
    )
    pages.write(batch, call.key.transpose(0, 1), call.value.transpose(0, 1))
    got, wanted = TritonPaged(CUDA).attend(pages, batch, call), GatherSdpa(CUDA).attend(pages, batch, call)
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-3)


def test_it_is_chosen_by_name() -> None:
    assert choose_backend("triton", CUDA, torch.bfloat16, [SHAPE], 16).name == "triton"
