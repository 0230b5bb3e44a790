"""Packed masks: only what they allow is drawn, and rows without one draw as if nobody had any."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache.messages import SamplingParams
from replica.output.sampler import DrawRow, Sampler

VOCABULARY, NUM_ROWS = 75, 6


def _packed(allowed: list[int], num_words: int = 3) -> torch.Tensor:
    bits = np.zeros(32 * num_words, dtype=np.uint8)
    bits[allowed] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_a_mask_allows_is_drawn_and_other_rows_are_left_alone(temperature: float) -> None:
    logits = torch.randn(NUM_ROWS, VOCABULARY, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    sampling = SamplingParams(max_tokens=9, temperature=temperature)
    rows = [DrawRow(sampling, seed, 20, 5) for seed in range(NUM_ROWS)]
    free = Sampler(frozenset()).sample(logits, rows).tokens
    allowed = {4: [0, 31, 32, 74], 1: [63], 2: list(range(VOCABULARY)), 0: [64, 65]}
    masks = {row: _packed(those) for row, those in allowed.items()}
    drawn = Sampler(frozenset()).sample(logits, rows, masks=masks).tokens
    assert torch.equal(logits, before)
    for row in range(NUM_ROWS):
        if row in allowed:
            assert drawn[row] in allowed[row]
    assert (drawn[2], drawn[3], drawn[5]) == (free[2], free[3], free[5])
    if temperature == 0:
        assert drawn[4] == max(allowed[4], key=lambda token_id: float(logits[4, token_id]))
