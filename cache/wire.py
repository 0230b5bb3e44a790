"""How messages travel between processes: msgpack, strict types, one format version, a size cap; never pickle.

Two versions of this code that meet in a rolling update refuse each other's messages by the version they name,
instead of failing inside them. Knows bytes; knows no message and no sockets.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import msgspec

from cache.errors import WireError


class Versioned(Protocol):
    """What every message begins with."""

    @property
    def version(self) -> int: ...


Message = TypeVar("Message", bound=Versioned)
Wire = TypeVar("Wire", bytes, bytes | memoryview)

_ENCODER = msgspec.msgpack.Encoder()


class _AnyVersion(msgspec.Struct):
    """Of a message of any version: enough to tell an old one from a broken one."""

    version: int


_VERSION_DECODER = msgspec.msgpack.Decoder(_AnyVersion)


class WireFormat(Generic[Message]):
    """One kind of message, by the name that errors give it."""

    def __init__(self, kind: type[Message], name: str, *, version: int, max_bytes: int) -> None:
        self._name = name
        self._version = version
        self.max_bytes = max_bytes
        self._decoder = msgspec.msgpack.Decoder(kind)

    def encode(self, message: Message) -> bytes:
        """Raises WireError if no receiver would take it: too large, a wrong type."""
        try:
            wire = _ENCODER.encode(message)
        except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeError) as error:
            raise WireError(f"cannot encode {self._name}: {error}") from error
        return within(wire, self.max_bytes, self._name)

    def decode(self, wire: bytes | memoryview) -> Message:
        """Inverse of `encode`. Raises WireError, naming what is wrong, for everything else."""
        within(wire, self.max_bytes, self._name)
        try:
            message = self._decoder.decode(wire)
        except (msgspec.MsgspecError, UnicodeError) as error:
            if (version := _version_of(wire)) not in (None, self._version):
                raise self._other_version(version) from error
            raise WireError(f"malformed {self._name}: {error}") from error
        if message.version != self._version:
            raise self._other_version(message.version)
        return message

    def _other_version(self, version: int | None) -> WireError:
        return WireError(f"{self._name} of format version {version}, not {self._version}")


def within(wire: Wire, limit: int, name: str) -> Wire:
    """The same bytes. Raises WireError for more than that."""
    if len(wire) > limit:
        raise WireError(f"{name} of {len(wire)} bytes, at most {limit} are taken")
    return wire


def _version_of(wire: bytes | memoryview) -> int | None:
    try:
        return _VERSION_DECODER.decode(wire).version
    except (msgspec.MsgspecError, UnicodeError):
        return None
