"""Two products in SDPA's place: the same attention, over room of which only a part counts."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from replica.attention import wide_decode
from replica.attention.wide_decode import WideDecode


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("value_dim", [16, 24])
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize(("size", "kv_heads"), [(1, 1), (5, 2), (3, 4)])
def test_it_is_sdpas_attention(size: int, kv_heads: int, group: int, value_dim: int, is_turned: bool) -> None:
    torch.manual_seed(size + group)
    wide = WideDecode()
    keys, values = torch.randn(size, kv_heads, 48, 16), torch.randn(size, kv_heads, 48, value_dim)
    keys[:, :, 40:] = torch.nan  # beyond every sequence: in no column that counts
    if is_turned:
        keys = keys.mT.contiguous().mT
    for length in (1, 33, 40):
        query = torch.randn(size, kv_heads, group, 16)
        bias = torch.zeros(size, 1, 1, length)
        bias[0, ..., length // 2 + 1 :] = -torch.inf
        for mask in (None, bias):
            expected = scaled_dot_product_attention(
                query, keys[:, :, :length], values[:, :, :length], attn_mask=mask, scale=0.3
            )
            got = wide.attend(query, keys, values, length=length, bias=mask, scale=0.3)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_it_is_left_alone_where_it_would_not_pay_or_could_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = WideDecode()
    monkeypatch.setattr(wide_decode, "FEWEST_ELEMENTS", 512)
    enough, few = torch.zeros(2, 2, 8, 16), torch.zeros(2, 2, 7, 16)
    assert wide.suits(enough, enough)
    assert wide.suits(torch.zeros(2, 2, 16, 8).mT, enough)
    assert wide.pays(512, torch.float32, torch.device("cpu"))
    assert not wide.pays(511, torch.float32, torch.device("cpu"))
    assert not wide.pays(512, torch.float32, torch.device("meta"))
    assert not wide.suits(few, few)
    assert not wide.suits(enough.half(), enough.half())
    assert not wide.suits(torch.zeros(2, 2, 9, 16)[:, :, :8], enough)  # a slice of the room
    assert not wide.suits(enough, torch.zeros(2, 8, 2, 16).transpose(1, 2))


def test_the_layers_of_a_step_share_their_rows() -> None:
    wide = WideDecode()
    first = wide._bags(4, 2, 32, 20)
    assert wide._bags(4, 2, 32, 20) is first
    for length in range(21, 21 + wide_decode.KEPT_BAGS):
        wide._bags(4, 2, 32, length)
    assert wide._bags(4, 2, 32, 20) is not first  # long steps do not pile up
