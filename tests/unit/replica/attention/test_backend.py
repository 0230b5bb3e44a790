"""Which backend a device gets."""

from __future__ import annotations

import pytest
import torch

from cache.errors import ConfigError
from replica.attention.backend import choose_backend
from replica.config import BLOCK_SIZES


@pytest.mark.parametrize("name", ["auto", "gather_sdpa"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_device_has_one(name: str, device: str) -> None:
    assert choose_backend(name, torch.device(device)).name == "gather_sdpa"


@pytest.mark.parametrize("name", BLOCK_SIZES)
def test_settings_name_those_there_are(name: str) -> None:
    assert choose_backend(name, torch.device("cpu")).name == name


def test_another_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"attention_backend = 'flash'.*auto, gather_sdpa"):
        choose_backend("flash", torch.device("cpu"))
