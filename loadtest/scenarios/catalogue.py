"""Every scenario by name, at a size that suits the model: prompts of a tenth of the words are `scale=0.1`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from loadtest.scenarios.adverse import HotSystemPrompt, NoSharing
from loadtest.scenarios.dialogues import Agent, Chat, LongAnswers
from loadtest.scenarios.documents import LongDocuments, Retrieval
from loadtest.scenarios.examples import FewShot, SelfConsistency
from loadtest.scenarios.scenario import Scenario
from loadtest.scenarios.tree_of_thought import TreeOfThought

SCENARIOS: Mapping[str, type[Any]] = {
    kind.name: kind
    for kind in (
        LongDocuments,
        Chat,
        FewShot,
        SelfConsistency,
        TreeOfThought,
        Retrieval,
        Agent,
        NoSharing,
        HotSystemPrompt,
        LongAnswers,
    )
}

_LENGTHS = ("_words", "_tokens")  # what names of lengths end in
_KEPT = ("score_tokens",)  # a digit stays a digit


def make_scenario(name: str, *, scale: float = 1.0, pauses: float = 1.0) -> Scenario:
    """One of `SCENARIOS`. scale: of all prompts' and answers' lengths. pauses: of all pauses; 0 = none.

    Raises KeyError for another name.
    """
    scenario: Scenario = _scaled(SCENARIOS[name](), scale, pauses)
    return scenario


def _scaled(value: Any, scale: float, pauses: float) -> Any:
    changes: dict[str, Any] = {}
    for field in fields(value):
        old = getattr(value, field.name)
        if is_dataclass(old):
            changes[field.name] = _scaled(old, scale, pauses)
        elif field.name.endswith(_LENGTHS) and field.name not in _KEPT:
            changes[field.name] = type(old)(max(1, round(old * scale)))
        elif field.name in ("think_s", "tool_s"):
            changes[field.name] = max(0.001, old * pauses)
    return replace(value, **changes)
