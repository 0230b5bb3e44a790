"""Versions that differ in a message's fields understand what both have of them."""

from __future__ import annotations

import copy
import pickle
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import pytest

from cache import messages
from cache.messages import AnswerSoFar, GenerateRequest, PinLease, SamplingParams
from cache.pickled import across_versions, missing_field
from cache.structure import Structure, StructureKind
from cache.types import PinId, RequestId, pack_tokens
from tests.fakes.versions import as_sent_by_position, as_sent_without

SAMPLING = SamplingParams(max_tokens=5, top_p=0.5, stop=("\n",), skip_special_tokens=False)
LEASE = PinLease(PinId("p"), "alice", 60.0, 2, 1.0, 61.0, "a", "salt")
REQUEST = GenerateRequest(
    request_id=RequestId("r"),
    token_ids=pack_tokens([1, 2, 3]),
    num_prompt_tokens=3,
    sampling=SAMPLING,
    seed=7,
    pin=LEASE,
    structure=Structure(StructureKind.JSON_SCHEMA, "{}"),
    answers=(AnswerSoFar(pack_tokens([4]), 1, is_over=False),),
    for_cache=True,
)


@across_versions
@dataclass(frozen=True, slots=True)
class Before:
    """A message before its fields were moved, one was added, and one was dropped."""

    first: int
    dropped: str = "d"
    last: int = 3


@across_versions
@dataclass(frozen=True, slots=True)
class After:
    first: int
    added: str = "a"
    last: int = 4


def test_a_field_in_between_moves_no_other() -> None:
    state = Before(1, "x", 9).__getstate__()  # type: ignore[attr-defined]
    arrived = object.__new__(After)
    arrived.__setstate__(state)  # type: ignore[attr-defined]
    assert arrived == After(1, "a", 9)


def test_what_another_version_has_besides_is_passed_over() -> None:
    assert as_sent_without(SAMPLING, {"top_p"}, surprise=1) == replace(SAMPLING, top_p=1.0)


@pytest.mark.parametrize("num_fields", [1, 8, len(fields(SAMPLING)) - 1, len(fields(SAMPLING))])
def test_versions_that_sent_values_alone_are_understood(num_fields: int) -> None:
    known = fields(SAMPLING)[:num_fields]
    expected = SamplingParams(**{field.name: getattr(SAMPLING, field.name) for field in known})
    assert as_sent_by_position(SAMPLING, num_fields) == expected


@pytest.mark.parametrize("message", [SAMPLING, LEASE, REQUEST])
def test_and_understand_what_this_one_sends(message: Any) -> None:
    """They took the values in their fields' order, and looked no further."""
    state = message.__getstate__()
    for field, value in zip(fields(message), state, strict=False):
        assert value == getattr(message, field.name)


@pytest.mark.parametrize("message", [SAMPLING, REQUEST])
def test_it_is_copied_like_any_other_value(message: Any) -> None:
    assert copy.copy(message) == copy.deepcopy(message) == message


def test_what_is_whole_lacks_nothing() -> None:
    assert missing_field(REQUEST) is None
    assert missing_field(pickle.loads(pickle.dumps(REQUEST))) is None


def test_what_it_lacks_is_named_wherever_it_is() -> None:
    changed = [
        as_sent_without(REQUEST, {"token_ids", "seed"}),
        replace(REQUEST, sampling=as_sent_without(SAMPLING, {"max_tokens"})),
        replace(REQUEST, pin=as_sent_without(LEASE, {"keeper"})),
        replace(REQUEST, structure=as_sent_without(REQUEST.structure, {"source"})),
        replace(REQUEST, answers=(*REQUEST.answers, as_sent_without(REQUEST.answers[0], {"is_over"}))),
    ]
    assert [missing_field(request) for request in changed] == [
        "token_ids",
        "sampling.max_tokens",
        "pin.keeper",
        "structure.source",
        "answers.is_over",
    ]


def test_every_message_that_is_pickled_is_one_of_them() -> None:
    """`ReplicaInfo` is sent as JSON."""
    kinds = [
        kind for kind in vars(messages).values() if isinstance(kind, type) and hasattr(kind, "__slots__")
    ]
    own = [kind for kind in kinds if kind.__module__ == messages.__name__ and kind.__name__ != "ReplicaInfo"]
    assert len(own) > 8
    for kind in own:
        assert kind.__getstate__.__module__ == "cache.pickled", kind


def test_no_last_field_is_taken_for_the_names() -> None:
    for message in (REQUEST, SAMPLING, LEASE, REQUEST.structure, REQUEST.answers[0]):
        last = fields(message)[-1]  # type: ignore[arg-type]
        assert "tuple" not in str(last.type), last.name
        assert last.default is MISSING or not isinstance(last.default, tuple)
