"""The table from error types to answers: every shared type has its row, nothing leaks."""

from __future__ import annotations

import json

import pytest

from cache import errors as shared
from cache.errors import ServingError
from router import errors
from router.openai_api.errors import OUTCOMES, answer_to, outcome_of

SECRET = "a secret prompt"


@pytest.mark.parametrize(
    ("error", "status", "code", "outcome"),
    [
        (errors.MalformedJson("x."), 400, "malformed_json", "invalid"),
        (errors.InvalidField("stop", "no"), 400, "invalid_value", "invalid"),
        (errors.UnsupportedParameter("n"), 400, "unsupported_parameter", "invalid"),
        (errors.PromptTooLong(9, 1, 8), 400, "context_length_exceeded", "invalid"),
        (errors.PromptFarTooLong(8), 400, "context_length_exceeded", "invalid"),
        (errors.NoChatTemplate("t"), 400, "no_chat_template", "invalid"),
        (errors.UnknownModel("m"), 404, "model_not_found", "not_found"),
        (errors.BodyTooLarge(1), 413, "body_too_large", "invalid"),
        (errors.BodyTooSlow(1, 10, 16384), 408, "body_too_slow", "invalid"),
        (shared.LeftUnread(9, 8), 408, "answer_not_read", "invalid"),
        (errors.AnswerNotTaken(900), 408, "answer_not_read", "invalid"),
        (errors.AllBusy(2, 3.2), 429, "server_busy", "busy"),
        (shared.QueueFull(1, 1), 429, "server_busy", "busy"),
        (errors.PromptsBusy(64), 429, "server_busy", "busy"),
        (errors.BodiesBusy(), 429, "server_busy", "busy"),
        (errors.StructuresBusy(64), 429, "server_busy", "busy"),
        (errors.NoReplica(), 503, "no_replica", "no_replica"),
        (errors.ReplicaLost(SECRET), 503, "replica_lost", "failed"),
        (errors.RouterUnheard(), 503, "router_unheard", "failed"),
        (errors.RouterLeaves(), 503, "router_leaves", "failed"),
        (shared.RequestRefused(SECRET), 503, "refused", "failed"),
        (shared.RefusedEverywhere(SECRET), 500, "refused_everywhere", "failed"),
        (shared.AdmissionFailed(SECRET), 500, "admission_failed", "failed"),
        (shared.DeadlineExceeded(1, 2), 504, "deadline_exceeded", "deadline"),
        (errors.TooManyDeaths("r", 2), 500, "too_many_deaths", "failed"),
        (shared.ForwardFailed(SECRET), 500, "forward_failed", "failed"),
        (ServingError(SECRET), 500, "internal_error", "failed"),
        (KeyError(SECRET), 500, "internal_error", "failed"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_every_kind_of_error_has_its_answer(error: Exception, status: int, code: str, outcome: str) -> None:
    answer = answer_to(error)
    assert (answer.status, answer.code, outcome_of(error)) == (status, code, outcome)
    assert set(json.loads(answer.content())["error"]) == {"message", "type", "param", "code"}
    assert SECRET not in answer.content().decode()
    assert outcome in OUTCOMES


def test_retry_after_is_whole_seconds_and_at_least_one() -> None:
    assert answer_to(errors.AllBusy(2, 3.2)).headers == {"retry-after": "4"}
    assert answer_to(errors.AllBusy(2, 0.0)).headers == {"retry-after": "1"}
    assert answer_to(errors.NoReplica()).headers == {"retry-after": "1"}
    assert answer_to(shared.ForwardFailed("x")).headers == {}


def test_whose_body_stopped_keeps_no_connection() -> None:
    assert answer_to(errors.BodyTooSlow(1, 10, 16384)).headers == {"connection": "close"}


def test_who_is_told_not_to_come_again() -> None:
    """Who killed replicas, whose time is over, who does not read, whom no replica can compute.

    A failed forward may have been somebody else's doing.
    """
    for final in (
        errors.TooManyDeaths("r", 2),
        shared.DeadlineExceeded(1, 2),
        shared.LeftUnread(9, 8),
        errors.AnswerNotTaken(900),
        shared.RefusedEverywhere("x"),
        shared.AdmissionFailed("x"),
    ):
        assert answer_to(final).headers == {"x-should-retry": "false"}
    for error in (shared.ForwardFailed("x"), shared.QueueFull(1, 1), errors.NoReplica(), KeyError("x")):
        assert "x-should-retry" not in answer_to(error).headers


def test_the_field_is_named() -> None:
    assert answer_to(errors.InvalidField("stop", "no")).param == "stop"
