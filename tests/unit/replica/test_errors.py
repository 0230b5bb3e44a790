"""Errors keep type, message and facts across a process border."""

from __future__ import annotations

import pytest

from cache.errors import ServingError
from replica import errors
from tests.error_trees import assert_complete, assert_survives_pickling

EXAMPLES = [
    errors.CollectiveFailed(0, "Connection closed by peer", 600.0),
    errors.EngineBroken("a step failed on rank 0 alone: out of memory"),
    errors.EngineError("something"),
    errors.EngineStopped("it was closed"),
    errors.EventSocketError("127.0.0.1", 5555, "in use"),
    errors.InvalidLogits([1, 3]),
    errors.InvalidRequest("top_p", "is 2"),
    errors.NeverBegan(3, 256, 60.2, 60.0),
    errors.RankLost(1, -9),
    errors.RankRefused(1, "needs 8.0 GiB of memory on cuda:1"),
    errors.RankSilent(1, 600.0),
    errors.StepOutOfMemory(512, "OutOfMemoryError"),
    errors.TooLargeForCache(10, 8, 4, 4),
    errors.WaitTooLong(3, 256, 31.5, 30.0),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: ServingError) -> None:
    assert_survives_pickling(error)


def test_every_error_has_an_example() -> None:
    assert_complete(EXAMPLES, errors)


def test_what_crosses_to_the_router_is_a_refusal() -> None:
    """The router decides by types it can import: all of these are RequestRefused to it."""
    for kind in (
        errors.EngineStopped,
        errors.AdmissionFailed,
        errors.InvalidRequest,
        errors.TooLargeForCache,
    ):
        assert issubclass(kind, errors.RequestRefused)
    assert issubclass(errors.TooLargeForCache, errors.PromptTooLong)
    assert issubclass(errors.WaitTooLong, errors.QueueFull)


def test_a_wait_that_is_too_long_says_when_to_come_back() -> None:
    error = errors.WaitTooLong(3, 256, 31.5, 30.0)
    assert error.retry_after_s == 1.5
    assert str(error) == "3 requests take 31.5 s, nobody waits longer than 30.0 s"


def test_who_never_began_is_told_how_long_it_waited() -> None:
    error = errors.NeverBegan(3, 256, 60.24, 60.0)
    assert isinstance(error, errors.QueueFull), "another replica may have room"
    assert str(error) == "it has waited 60.2 s and not begun; nobody waits over 60.0 s"


def test_a_failed_collective_is_found_behind_what_was_raised_from_it() -> None:
    """A forward that is tried wraps whatever it fails with."""
    wrapped = ValueError("its forward fails")
    wrapped.__cause__ = errors.CollectiveFailed(0, "Connection closed by peer", 600.0)
    assert errors.CollectiveFailed.behind(wrapped.__cause__) is wrapped.__cause__
    assert errors.CollectiveFailed.behind(wrapped) is wrapped.__cause__
    assert errors.CollectiveFailed.behind(ValueError("its own forward fails")) is None


def test_too_large_names_all_numbers() -> None:
    error = errors.TooLargeForCache(10, 8, 4, 4)
    assert str(error) == (
        "10 prompt tokens and up to 8 output tokens do not fit the KV cache of 16 tokens (4 blocks of 4)"
    )
    assert (error.prompt_tokens, error.limit) == (10, 16)
