"""The results, written to a file after every one: a run that is cut off goes on where it stopped.

A result belongs to its conditions (card, versions, plan); a file of others is refused, not mixed in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """One measurement of one contender."""

    section: str
    case: str
    contender: str
    seconds: float | None = None  # median; None where something else was measured
    values: Mapping[str, float] = field(default_factory=dict)  # rates, ratios to the card's limits
    note: str = ""  # why it is missing
    outputs: tuple[tuple[int, ...], ...] = ()  # greedy tokens, by prompt
    warm_outputs: tuple[tuple[int, ...], ...] = ()  # the same from the cache
    # Of `generate`, by prompt and place: the likeliest tokens, and how far below the first each logit is.
    nearest: tuple[tuple[tuple[tuple[int, float], ...], ...], ...] = ()

    @property
    def is_missing(self) -> bool:
        return bool(self.note)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.section, self.case, self.contender


class OtherConditions(Exception):
    """The file holds results of another card, plan or version."""


class NoResults(Exception):
    """The file holds something else: what `--out` names by mistake is left as it is."""


class Sheet:
    """Owned by the benchmark's process; `path` is replaced as a whole, never half written."""

    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        """Takes in what the file holds. Raises OtherConditions, NoResults, and OSError where nothing can be
        written."""
        self._path, self._conditions = path, dict(conditions)
        self._draft = path.with_name(f".{path.name}")
        self._results: dict[tuple[str, str, str], Result] = {}
        if path.exists():
            found, results = _read(path)
            if found != self._conditions:
                raise OtherConditions(f"{path} is of {found}, not of {self._conditions}")
            for each in results:
                nested = {name: _frozen(each.pop(name)) for name in ("outputs", "warm_outputs", "nearest")}
                self._keep(Result(**each, **nested))
        self._draft.write_text("")  # what cannot be written is told now, not with the first result

    def __contains__(self, key: tuple[str, str, str]) -> bool:
        return key in self._results

    def __iter__(self) -> Iterator[Result]:
        return iter(self._results.values())

    def get(self, section: str, case: str, contender: str) -> Result | None:
        return self._results.get((section, case, contender))

    def add(self, result: Result) -> None:
        """Keep it, on disk too."""
        self._keep(result)
        document = {"conditions": self._conditions, "results": [asdict(each) for each in self]}
        self._draft.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(self._draft, self._path)

    def _keep(self, result: Result) -> None:
        self._results[result.key] = result


def forget(path: Path) -> None:
    """Remove a file of results, where there is one. Raises NoResults for any other file, and OSError."""
    if path.exists():
        _read(path)
        path.unlink()


def _read(path: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Conditions, and the results under them."""
    try:
        document = json.loads(path.read_text())
        return document["conditions"], document["results"]
    except (ValueError, TypeError, LookupError) as error:
        raise NoResults(f"{path} holds no results of this benchmark") from error


def _frozen(value: Any) -> Any:
    """Tuples where JSON has lists."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
