"""The documents of a YAML file as `kubectl apply` sends them. Knows no kind but List."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from deploy import strict_yaml


def documents(text: str | bytes) -> list[Any]:
    """Whatever they are, objects or not. Raises yaml.YAMLError for what is no YAML, or no JSON."""
    return list(as_sent(strict_yaml.load_all(text)))


def as_sent(read: Iterable[Any]) -> Iterator[Any]:
    """As JSON; a List's items one by one; none that is empty.

    null is a field left out: so does an API server take it. Raises yaml.YAMLError for what is no JSON.
    """
    for each in read:
        try:
            text = json.dumps(each, allow_nan=False, default=str)  # of dates: text, as kubectl has them
            sent = json.loads(text, object_pairs_hook=_without_null)
        except (TypeError, ValueError, RecursionError) as error:
            raise yaml.YAMLError(f"is no JSON: {error}") from None
        yield from _items(sent)


def _without_null(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value for key, value in pairs if value is not None}


def _items(document: Any) -> Iterator[Any]:
    if document is None:
        return
    if not (isinstance(document, dict) and document.get("kind") == "List"):
        yield document
        return
    items = document.get("items", [])
    for each in items if isinstance(items, list) else [items]:
        yield from _items(each)
