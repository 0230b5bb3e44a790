"""Errors carry their facts across process borders and into messages."""

from __future__ import annotations

import pickle

import pytest

from cache.errors import ServingError
from router import errors

EXAMPLES = [
    errors.NoReplica(3, 1),
    errors.NoReplica(),
    errors.AllBusy(2, 4.2),
    errors.TooManyDeaths("req-1", 2),
    errors.MalformedJson("line 1"),
    errors.BodyTooLarge(4096, 5000),
    errors.BodyTooLarge(4096),
    errors.UnknownModel("gpt", ["tiny"]),
    errors.InvalidField("top_p", "'top_p' must be between 0 and 1."),
    errors.UnsupportedParameter("logprobs"),
    errors.PromptTooLong(5000, 100, 4096),
    errors.NoChatTemplate("tiny"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling_with_their_facts(error: ServingError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_too_long_a_prompt_names_every_number() -> None:
    error = errors.PromptTooLong(5000, 100, 4096)
    assert all(number in str(error) for number in ("5000", "100", "4096", "5100"))
    assert (error.param, error.code) == ("messages", "context_length_exceeded")


def test_an_unknown_model_says_what_is_served() -> None:
    error = errors.UnknownModel("gpt" * 1000, ["tiny"])
    assert "tiny" in str(error)
    assert len(str(error)) < 400
