"""What a step needs of a card, against sums done another way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu import work
from benchmarks.gpu.plan import EIGHT_B


def test_the_8b_network_is_one() -> None:
    weights = work.layer_weights(EIGHT_B) + 2 * work.head_weights(EIGHT_B)  # the embedding is as large
    assert weights == pytest.approx(EIGHT_B.num_parameters, rel=1e-4)
    assert 8.1e9 < EIGHT_B.num_parameters < 8.3e9


def test_a_tokens_keys_and_values() -> None:
    """36 layers, 8 heads of 128, keys and values, two bytes each."""
    assert work.kv_bytes(EIGHT_B, 2) == 36 * 8 * 128 * 2 * 2 == 147_456


@given(tokens=st.integers(2, 40_000), cut=st.floats(0, 0.999))
def test_what_is_cached_and_what_is_not_add_up(tokens: int, cut: float) -> None:
    """But for the output layer, which both draw from."""
    cached = int(tokens * cut)
    head = 2.0 * work.head_weights(EIGHT_B)
    if cached:
        parts = work.prefill_operations(EIGHT_B, cached) + work.prefill_operations(EIGHT_B, tokens, cached)
        assert parts - head == pytest.approx(work.prefill_operations(EIGHT_B, tokens))


def test_what_a_hit_of_nine_tenths_may_gain() -> None:
    """At 16,384 tokens, by operations: what the target of 6.5 stands beside."""
    tokens = 16_384
    computed = work.prefill_operations(EIGHT_B, tokens, int(0.9 * tokens))
    gain = work.prefill_operations(EIGHT_B, tokens) / computed
    assert round(gain, 2) == 8.11


def test_a_decode_reads_weights_once_and_each_context() -> None:
    weights = (work.layer_weights(EIGHT_B) + work.head_weights(EIGHT_B)) * 2
    assert work.decode_bytes(EIGHT_B, 1, 0, 2) == weights
    assert work.decode_bytes(EIGHT_B, 64, 1_000, 2) - weights == 64 * 1_000 * 147_456
