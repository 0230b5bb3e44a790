"""What holds for every error of a package: it crosses a process border with its facts."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from types import ModuleType

from cache.errors import ServingError


def assert_complete(examples: Iterable[ServingError], module: ModuleType) -> None:
    """Each error that the module defines has an example."""
    defined = {kind for kind in _kinds(ServingError) if kind.__module__ == module.__name__}
    assert {type(error) for error in examples} == defined


def assert_survives_pickling(error: ServingError, protocol: int = pickle.DEFAULT_PROTOCOL) -> None:
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is type(error)
    assert str(again) == str(error) != ""
    assert vars(again) == vars(error)


def _kinds(kind: type[ServingError]) -> Iterator[type[ServingError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _kinds(child)
