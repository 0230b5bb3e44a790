"""What a Router tells another of the pins that it keeps arrives as it was sent, and nothing else does."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest

from cache.errors import WireError
from cache.types import PinId, ReplicaId
from router.prefixes.kept_report import FORMAT_VERSION, KeptPrefix, KeptReport, decode_kept, encode_kept
from router.prefixes.prefix import PinnedPrefix

PIN = PinnedPrefix(PinId("prefix-1"), "alice", 4, 2, (ReplicaId("r1"),), 10.5, 70.5, "a")


def test_it_arrives_as_it_was_sent() -> None:
    pins = [PIN, replace(PIN, pin_id=PinId("prefix-2"), replicas=())]
    assert decode_kept(encode_kept("a", pins)) == pins
    assert decode_kept(encode_kept("a", [])) == []


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        (b"", "malformed kept prefixes"),
        (b"\xc1", "malformed kept prefixes"),
        (encode_kept("a", [replace(PIN, expires_at=math.inf)]), "not finite"),
        (msgspec.msgpack.encode(KeptReport(FORMAT_VERSION + 1, "a", ())), "of format version"),
        (msgspec.msgpack.encode({"type": "kept", "version": 1, "router": "a", "pins": [["p"]]}), "malformed"),
    ],
)
def test_anything_else_is_refused(wire: bytes, said: str) -> None:
    with pytest.raises(WireError, match=said):
        decode_kept(wire)


def test_every_field_but_the_keeper_travels() -> None:
    assert KeptPrefix.__struct_fields__ == tuple(PinnedPrefix.__dataclass_fields__)[:-1]
