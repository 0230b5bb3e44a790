"""Errors carry their facts across process borders and into messages."""

from __future__ import annotations

import pytest

from cache.errors import ServingError
from router import errors
from tests.error_trees import assert_complete, assert_survives_pickling

EXAMPLES = [
    errors.RoutingError("something"),
    errors.NoReplica(3, 1),
    errors.NoReplica(),
    errors.AllBusy(2, 4.2),
    errors.ReplicaLost("its connection was cut"),
    errors.TooManyDeaths("req-1", 2),
    errors.AnswerNotTaken(900),
    errors.RouterUnheard(),
    errors.RouterLeaves(),
    errors.PromptsBusy(64),
    errors.BodiesBusy(),
    errors.StructuresBusy(64),
    errors.ApiError("no", param="n", code="invalid_value"),
    errors.MalformedJson("line 1"),
    errors.BodyTooLarge(4096, 5000),
    errors.BodyTooLarge(4096),
    errors.BodyTooSlow(4096, 10, 16384),
    errors.HeadersTooLarge(4096, 5000),
    errors.UnknownModel("gpt", ["tiny"]),
    errors.InvalidApiKey(),
    errors.NotPermitted(),
    errors.RateLimitExceeded("requests_per_minute", 4.2),
    errors.InvalidField("top_p", "'top_p' must be between 0 and 1."),
    errors.UnsupportedParameter("logprobs"),
    errors.PromptTooLong(5000, 100, 4096),
    errors.PromptFarTooLong(4096, param="prompt"),
    errors.PrefixDoesNotFit(needed=12, left=3, copies=2, num_held=1),
    errors.PrefixLimitReached("tokens", needed=512, left=100, limit=4096),
    errors.PrefixCachingOff(),
    errors.PrefixNotFound(),
    errors.NoChatTemplate("tiny"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling_with_their_facts(error: ServingError) -> None:
    assert_survives_pickling(error)


def test_every_error_has_an_example() -> None:
    assert_complete(EXAMPLES, errors)


def test_too_long_a_prompt_names_every_number() -> None:
    error = errors.PromptTooLong(5000, 100, 4096)
    assert all(number in str(error) for number in ("5000", "100", "4096", "5100"))
    assert (error.param, error.code) == ("messages", "context_length_exceeded")


def test_an_unknown_model_says_what_is_served() -> None:
    error = errors.UnknownModel("gpt" * 1000, ["tiny"])
    assert "tiny" in str(error)
    assert len(str(error)) < 400
