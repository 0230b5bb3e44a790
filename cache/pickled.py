"""Messages that two versions of this code pickle for each other, as in a rolling update: by fields' names.

    state  =  [value of each field, in order, (the fields' names, joined)]

By themselves dataclasses with slots are pickled by position, and a field that the other version has not sent
is an AttributeError wherever it is first looked at. Here such a field has its default, and what is not known
is passed over. The values come first because versions before this one read them by position, and no further
than they have fields; of what they send, what is missing is missing at the end. A message cannot be refused
while it is unpickled, which Serve would tell nobody: one that lacks a field without a default is refused by
whoever takes it in, by `missing_field`.
Knows dataclasses; knows no message.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from operator import attrgetter
from typing import TypeVar

_Kind = TypeVar("_Kind")

_names_by_kind: dict[type, tuple[str, ...]] = {}  # of those below


def across_versions(kind: type[_Kind]) -> type[_Kind]:
    """A frozen dataclass with slots, two fields at least and no default factories, pickled so."""
    known: tuple[Field[object], ...] = fields(kind)  # type: ignore[arg-type]
    names = tuple(field.name for field in known)
    assert len(names) > 1
    assert all(field.default_factory is MISSING for field in known)
    joined = (",".join(names),)
    values_of = attrgetter(*names)
    setters = {name: getattr(kind, name).__set__ for name in names}  # frozen: `setattr` is not for us
    in_order = tuple(setters.values())
    defaults = {field.name: field.default for field in known if field.default is not MISSING}

    def get_state(self: object) -> list[object]:
        return [*values_of(self), joined]

    def set_state(self: object, state: list[object]) -> None:
        if state[-1] == joined:
            for setter, value in zip(in_order, state, strict=False):
                setter(self, value)
            return
        sent = defaults | dict(zip(_names_in(state) or names, state, strict=False))
        for name in sent.keys() & setters.keys():
            setters[name](self, sent[name])

    kind.__getstate__ = get_state  # type: ignore[method-assign]
    kind.__setstate__ = set_state  # type: ignore[attr-defined]
    _names_by_kind[kind] = names
    return kind


def missing_field(message: object) -> str | None:
    """The first field, also of messages inside, that was not sent and has no default: `sampling.max_tokens`.

    None: it is whole. O(fields).
    """
    for name in _names_by_kind[type(message)]:
        try:
            value = getattr(message, name)
        except AttributeError:
            return name
        parts = value if type(value) is tuple and value and type(value[0]) in _names_by_kind else (value,)
        for part in parts:
            if type(part) in _names_by_kind and (inside := missing_field(part)) is not None:
                return f"{name}.{inside}"
    return None


def _names_in(state: list[object]) -> list[str] | None:
    """None: it is of a version that sent values alone. No message's last field is such a tuple."""
    match state:
        case [*_, (str(joined),)]:
            return joined.split(",")
        case _:
            return None
