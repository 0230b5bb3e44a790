"""The parts a prefill is cut into, each route by name, against dense attention in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.attention import cpu_flash
from replica.attention.cpu_flash import CpuFlash, KeysAndValues
from tests.fakes.steps import CPU

SCALE = 0.3


def drawn(
    kv_heads: int,
    group: int,
    num_rows: int,
    num_context: int,
    dim: int = 8,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, KeysAndValues, KeysAndValues | None]:
    """As they come from a step: tokens outermost in memory, heads outermost in shape."""
    torch.manual_seed(num_rows + num_context)

    def tokens(count: int) -> torch.Tensor:
        return torch.randn(count, kv_heads, dim).to(dtype).transpose(0, 1)

    query = torch.randn(num_rows, kv_heads, group, dim).to(dtype).permute(1, 2, 0, 3)
    context = (tokens(num_context), tokens(num_context)) if num_context else None
    return query, (tokens(num_rows), tokens(num_rows)), context


def dense(query: torch.Tensor, new: KeysAndValues, context: KeysAndValues | None) -> torch.Tensor:
    keys, values = (
        (torch.cat([context[index], each], dim=1) if context is not None else each).double()[:, None]
        for index, each in enumerate(new)
    )
    num_rows, num_keys = query.shape[2], keys.shape[2]
    scores = query.double() @ keys.transpose(2, 3) * SCALE
    hidden = torch.ones(num_rows, num_keys, dtype=torch.bool).triu(1 + num_keys - num_rows)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values


def flash() -> CpuFlash:
    found = CpuFlash.find(CPU)
    assert found is not None  # a trial that fails silently would cost a tenth of every prefill
    return found


@pytest.mark.parametrize("num_context", [0, 1, 15, 16, 511, 512, 700])
@pytest.mark.parametrize("num_rows", [1, 383, 384, 400, 511, 512, 767, 768, 801])
def test_every_cut_is_dense_attention(num_rows: int, num_context: int) -> None:
    """Below, in and above the lengths that are cut; contexts that end with a vector and those that do not."""
    case = drawn(2, 3, num_rows, num_context)
    torch.testing.assert_close(flash().attend(*case, SCALE), dense(*case).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_half_precision_is_merged_by_full_weights(dtype: torch.dtype, tolerance: float) -> None:
    case = drawn(2, 2, 509, 1021, dtype=dtype)
    attended = flash().attend(*case, SCALE)
    assert attended.dtype == dtype
    torch.testing.assert_close(attended.double(), dense(*case), rtol=tolerance, atol=tolerance)


@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    num_rows=st.integers(1, 40),
    num_context=st.integers(0, 20),
    lanes=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=150)
def test_wherever_cuts_fall(kv_heads: int, group: int, num_rows: int, num_context: int, lanes: int) -> None:
    """Small limits: halves of halves, contexts that are all odd keys, groups of one."""
    case = drawn(kv_heads, group, num_rows, num_context)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_flash, "FEWEST_ROWS", 8)
        patch.setattr(cpu_flash, "LARGE_TILE_ROWS", 33)
        patch.setattr(cpu_flash, "LANES", lanes)
        attended = flash().attend(*case, SCALE)
    torch.testing.assert_close(attended, dense(*case).float(), rtol=1e-5, atol=1e-5)


def test_the_kernel_sees_whole_vectors_of_keys() -> None:
    """511 tokens after 511, as beside a decode: what is not is a sixth slower."""
    seen: list[int] = []
    kernel = flash()._kernel

    def watched(*given: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(given[1].shape[2])
        return kernel(*given, **options)

    CpuFlash(watched).attend(*drawn(2, 4, 511, 511), SCALE)
    assert seen == [272, 256, 272, 496]


@pytest.mark.parametrize("failure", [AttributeError("gone"), RuntimeError("other arguments"), None])
def test_a_kernel_that_behaves_otherwise_is_left_alone(
    failure: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(query: torch.Tensor, *others: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        if failure is not None:
            raise failure
        return query, torch.zeros(1, 1, 2)  # a log-sum-exp in another base, or of something else

    class Operations:
        _scaled_dot_product_flash_attention_for_cpu = staticmethod(kernel)

    monkeypatch.setattr(torch.ops, "aten", Operations)
    assert CpuFlash.find(CPU) is None
