"""Where a channel listens, as text: what is told is found again, and nothing else is an address."""

from __future__ import annotations

import pytest

from cache.channel.endpoint import address_of, endpoint_of


@pytest.mark.parametrize("host", ["127.0.0.1", "node-7", "fd00::1"])
def test_an_address_comes_back(host: str) -> None:
    assert address_of(endpoint_of(host, 65535)) == (host, 65535)


@pytest.mark.parametrize(
    "text", ["", "tcp://", "tcp://:1", "tcp://a", "tcp://a:x", "tcp://a:0", "tcp://a:65536", "http://a:1"]
)
def test_anything_else_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"not an endpoint|invalid literal"):
        address_of(text)
