"""Attention over pages equals dense attention over each sequence alone, whatever is packed together.

The cases are `tests/attention_cases.py`'s; here the routes and limits of gather + SDPA are turned.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.attention import gather_sdpa, step_batch, wide_decode
from replica.attention.gather_sdpa import GatherSdpa
from tests.attention_cases import CPU, Layer, Sequence, batches, check, empty_pages, layers


@given(
    layer=layers(),
    batch=batches(),
    seed=st.integers(0, 1000),
    has_flash=st.booleans(),
    group_tokens=st.sampled_from([8, 64, 1 << 15]),
    short_blocks=st.sampled_from([1, 8]),
    max_scores=st.sampled_from([64, 1 << 26]),
)
@settings(max_examples=50)
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
@pytest.mark.broad
@given(layer=layers(), batch=batches(), seed=st.integers(0, 10**6), has_flash=st.booleans())
@settings(max_examples=400)
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
@settings(max_examples=40)
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
