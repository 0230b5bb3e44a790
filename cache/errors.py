"""The root of every error the project raises on purpose, and the cache's part of the tree.

    ServingError
    ├── ConfigError            a setting is wrong; raised before anything starts
    ├── NoFreeBlocks           the pool cannot give the blocks asked for
    ├── WireError              bytes from a socket that do not decode to what was promised
    ├── replica/errors.py      EngineError, RequestRefused, ...
    └── router/errors.py       ApiError, NoReplica, ...

Knows nothing of HTTP: status codes are chosen in `deploy/http_errors.py`.
"""

from __future__ import annotations

from typing import Any


class ServingError(Exception):
    """Root of the tree. Survives pickling whatever a subclass's constructor looks like.

    Errors cross process borders (a replica's error reaches its client through a handle), and the
    default `BaseException.__reduce__` would call the constructor with the message alone.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(kind: type[ServingError], args: tuple[Any, ...], facts: dict[str, Any]) -> ServingError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(facts)
    return error


class ConfigError(ServingError):
    """A setting has a value it cannot have: names the field, the value and what would be accepted."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        super().__init__(f"{field} = {value!r}: {accepted}")
        self.field = field
        self.value = value
        self.accepted = accepted


class NoFreeBlocks(ServingError):
    """The block pool has fewer free blocks than asked for; nothing was allocated."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"needed {needed} free blocks, have {free}")
        self.needed = needed
        self.free = free


class WireError(ServingError):
    """A message from a socket is malformed, too large, or of another format version."""
