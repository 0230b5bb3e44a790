"""What one Router tells another of the pins that it keeps.

    KeptReport  =  who answers  +  [KeptPrefix: one pin, and who holds a copy as far as this Router knows]

Travels between the Routers of one application as their metrics do (`router/fleet/report.py`): msgpack, strict
types, a size cap. Knows pins; knows neither who asks whom nor what is done with the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from cache.errors import WireError
from cache.types import PinId, ReplicaId
from cache.wire import WireFormat
from router.prefixes.prefix import PinnedPrefix

FORMAT_VERSION = 1
MAX_REPORT_BYTES = 16 << 20  # a pin has some 200 bytes, and a replica 40


class KeptPrefix(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`PinnedPrefix`, without its keeper: that is who answers."""

    pin_id: PinId
    owner: str
    num_blocks: int
    copies: int
    replicas: tuple[ReplicaId, ...]
    created_at: float
    expires_at: float


class KeptReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="kept"):
    """A Router's answer to another."""

    version: int
    router: str  # who answers, and keeps these
    pins: tuple[KeptPrefix, ...]


def encode_kept(router: str, pins: Iterable[PinnedPrefix]) -> bytes:
    """These pins, kept by this Router. Raises WireError if no receiver would take it."""
    kept = tuple(
        KeptPrefix(
            *(pin.pin_id, pin.owner, pin.num_blocks, pin.copies, tuple(pin.replicas)),
            *(pin.created_at, pin.expires_at),
        )
        for pin in pins
    )
    return _FORMAT.encode(KeptReport(FORMAT_VERSION, router, kept))


def decode_kept(wire: bytes) -> list[PinnedPrefix]:
    """What was encoded. Raises WireError, naming what is wrong, for everything else."""
    report = _FORMAT.decode(wire)
    if not all(math.isfinite(at) for pin in report.pins for at in (pin.created_at, pin.expires_at)):
        raise WireError("malformed kept prefixes: a time is not finite")
    return [
        PinnedPrefix(
            *(pin.pin_id, pin.owner, pin.num_blocks, pin.copies, pin.replicas),
            *(pin.created_at, pin.expires_at, report.router),
        )
        for pin in report.pins
    ]


_FORMAT = WireFormat(KeptReport, "kept prefixes", version=FORMAT_VERSION, max_bytes=MAX_REPORT_BYTES)
