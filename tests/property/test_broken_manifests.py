"""Whatever one node of a manifest is, `check` ends, with findings or without."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from k8s.check import EXAMPLES, manifest_findings
from k8s.documents import as_sent, documents
from k8s.places import PLACES

Path = tuple[str | int, ...]
LEFT_OUT = "left out"
OTHERS = st.sampled_from([LEFT_OUT, None, [], ["x"], {}, {"x": 1}, "x", "", "1\n", 7, -1, 1 << 20, 0.5, True])


@cache
def _files() -> dict[str, list[Any]]:
    """Each with what it refers to."""
    kept = {place.name: documents(place.kept.read_bytes()) for place in PLACES.values()}
    files = {name: found for name, found in kept.items() if PLACES[name].beside is None}
    beside = {name: found for name, found in kept.items() if name not in files}
    beside |= {path.name: documents(path.read_bytes()) for path in EXAMPLES.glob("*.yaml")}
    return files | {name: [*found, *kept["gpu"]] for name, found in beside.items()}


@cache
def _nodes() -> list[tuple[str, Path]]:
    """One for each place that there is, whichever of several items has it."""
    found = {
        (documents[path[0]]["kind"], *("*" if isinstance(part, int) else part for part in path[1:])): (
            name,
            path,
        )
        for name, documents in _files().items()
        for path in _paths(documents)
        if path
    }
    return list(found.values())


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    yield path
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(each, (*path, key))


@given(st.data(), OTHERS)
def test_a_check_ends_whatever_one_node_is(data: st.DataObject, other: Any) -> None:
    name, (*parents, key) = data.draw(st.sampled_from(_nodes()))
    changed = at = copy.deepcopy(_files()[name])
    for part in parents:
        at = at[part]
    if other == LEFT_OUT:
        del at[key]
    else:
        at[key] = other
    assert all(str(each) for each in manifest_findings("x", list(as_sent(changed))))
