"""Messages as another version of this code pickles them."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from dataclasses import fields
from typing import Any, TypeVar

_Message = TypeVar("_Message")


class _Pickled:
    """An object of `kind` with this state, once it is unpickled."""

    def __init__(self, kind: type, state: list[Any]) -> None:
        self._kind, self._state = kind, state

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (self._kind,), self._state


def as_sent_without(message: _Message, names: Collection[str], **unknown: object) -> _Message:
    """What arrives of it from a version that knows none of these fields, and some that this one does not."""
    known = [field.name for field in fields(message) if field.name not in names]  # type: ignore[arg-type]
    sent = {**{name: getattr(message, name) for name in known}, **unknown}
    return _arrived(type(message), [*sent.values(), (",".join(sent),)])


def as_sent_by_position(message: _Message, num_fields: int) -> _Message:
    """What arrives of it from a version that pickled values alone, and has no more than the first fields."""
    values = [getattr(message, field.name) for field in fields(message)]  # type: ignore[arg-type]
    return _arrived(type(message), values[:num_fields])


def _arrived(kind: type[_Message], state: list[Any]) -> _Message:
    arrived: _Message = pickle.loads(pickle.dumps(_Pickled(kind, state)))
    return arrived
