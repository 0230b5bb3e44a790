"""The rotary embedding in place is transformers' own, bit for bit, with each layer's cosines and sines."""

from __future__ import annotations

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from replica.layers.rotary import Rotary


def angles(num_tokens: int, dim: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    half = torch.randn(1, num_tokens, dim // 2, generator=torch.Generator().manual_seed(seed))
    both = torch.cat([half, half], dim=-1)
    return both.cos(), both.sin()


def test_it_is_transformers_own_to_the_last_bit() -> None:
    torch.manual_seed(0)
    rotary = Rotary()
    of_first, of_second = angles(5, 16, seed=1), angles(5, 16, seed=2)
    for cosines, sines in (of_first, of_first, of_second, of_first):  # layers, two kinds of them
        packed = torch.randn(5, 8, 16)  # 4 heads of queries, 2 of keys, 2 of values
        query, key = packed[:, :4].transpose(0, 1)[None], packed[:, 4:6].transpose(0, 1)[None]
        turned_query, turned_key = apply_rotary_pos_emb(query, key, cosines, sines)
        values = packed[:, 6:].clone()
        rotary.turn(packed[:, :6], cosines, sines)
        assert torch.equal(packed[:, :4].transpose(0, 1), turned_query[0])
        assert torch.equal(packed[:, 4:6].transpose(0, 1), turned_key[0])
        assert torch.equal(packed[:, 6:], values)


def test_the_angles_are_left_as_they_were() -> None:
    cosines, sines = angles(3, 8, seed=0)
    before = cosines.clone(), sines.clone()
    Rotary().turn(torch.randn(3, 2, 8), cosines, sines)
    assert torch.equal(cosines, before[0])
    assert torch.equal(sines, before[1])
