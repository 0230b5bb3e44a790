"""Every validation row: what is accepted becomes a value, what is not is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.errors import InvalidField, UnsupportedParameter
from router.openai_api.fields import FIELDS, Endpoint, Field, Use, count_unknown, refuse_unsupported
from router.openai_api.prompts import TextPrompt, TokenPrompt
from router.openai_api.schema import parse_chat, parse_completion

MESSAGES = [{"role": "user", "content": "hello"}]


def _chat(**fields: Any) -> Any:
    return parse_chat({"model": "m", "messages": MESSAGES, **fields})


def _completion(**fields: Any) -> Any:
    return parse_completion({"model": "m", "prompt": "hello", **fields})


WRONG: list[tuple[str, Any, str]] = [
    ("model", 1, "model"),
    ("model", "", "model"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -1, "max_tokens"),
    ("max_tokens", 1.5, "max_tokens"),
    ("max_tokens", "1", "max_tokens"),
    ("max_tokens", True, "max_tokens"),
    ("max_tokens", 10**30, "max_tokens"),
    ("min_tokens", -1, "min_tokens"),
    ("temperature", -0.1, "temperature"),
    ("temperature", 2.1, "temperature"),
    ("temperature", "1", "temperature"),
    ("temperature", float("inf"), "temperature"),
    ("temperature", float("nan"), "temperature"),
    ("temperature", 10**400, "temperature"),
    ("temperature", [], "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.01, "top_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 0.5, "top_k"),
    *(("min_p", value, "min_p") for value in (-0.1, 1.1, "0", True, float("nan"))),
    *(("presence_penalty", value, "presence_penalty") for value in (-2.1, 2.1, "0", False, 1e308)),
    *(("frequency_penalty", value, "frequency_penalty") for value in (-2.1, 2.1, [], float("inf"))),
    *(("repetition_penalty", value, "repetition_penalty") for value in (0, -1, 1e-40, 101, "1", 1e308)),
    *(("logit_bias", value, "logit_bias") for value in ([], 1, "5", {"x": 1}, {"5": 101}, {"5": None})),
    *(("logit_bias", value, "logit_bias") for value in ({"-5": 1}, {"05": 1}, {"5": True}, {"9" * 400: 1})),
    *(("logit_bias", value, "logit_bias") for value in ({"٣": 1}, {str(1 << 31): 1}, {"5": float("nan")})),
    ("logit_bias", {str(token): 1 for token in range(1025)}, "logit_bias"),
    ("logprobs", "yes", "logprobs"),
    ("logprobs", 21, "logprobs"),
    ("logprobs", -1, "logprobs"),
    ("seed", 1 << 63, "seed"),
    ("seed", "a", "seed"),
    ("seed", 1.0, "seed"),
    ("stop", "", "stop"),
    ("stop", ["a", ""], "stop"),
    ("stop", [1], "stop"),
    ("stop", 1, "stop"),
    ("stop", {}, "stop"),
    ("stop_token_ids", 1, "stop_token_ids"),
    ("stop_token_ids", [-1], "stop_token_ids"),
    ("stop_token_ids", [True], "stop_token_ids"),
    ("stop_token_ids", [1 << 31], "stop_token_ids"),
    ("ignore_eos", 1, "ignore_eos"),
    ("ignore_eos", "true", "ignore_eos"),
    ("stream", 1, "stream"),
    ("stream_options", {}, "stream_options"),  # without stream
    ("cache_salt", "", "cache_salt"),
    ("cache_salt", "x" * 1025, "cache_salt"),
    ("cache_salt", 1, "cache_salt"),
]


@pytest.mark.parametrize("parse", [_chat, _completion])
@pytest.mark.parametrize(("name", "value", "param"), WRONG)
def test_a_wrong_value_is_named(parse: Any, name: str, value: Any, param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse(**{name: value})
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("temperature", 3, "a number between 0 and 2"),
        ("top_p", 2, "a number above 0 and up to 1"),
        ("max_tokens", 0, "an integer of at least 1"),
        ("cache_salt", "", "a non-empty string"),
    ],
)
def test_the_accepted_range_is_in_the_message(name: str, value: Any, accepted: str) -> None:
    with pytest.raises(InvalidField, match=accepted):
        _chat(**{name: value})


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"include_usage": 1}, "stream_options.include_usage"),
        ({"continuous_usage_stats": "x"}, "stream_options.continuous_usage_stats"),
        ({"include_obfuscation": True}, "stream_options.include_obfuscation"),
        ({"include_obfuscation": "no"}, "stream_options.include_obfuscation"),
        (5, "stream_options"),
    ],
)
def test_stream_options_are_checked_inside(options: Any, param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        _chat(stream=True, stream_options=options)
    assert caught.value.param == param


@pytest.mark.parametrize("parse", [_chat, _completion])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": None}, {"include_usage": False}])
def test_stream_options_may_ask_for_nothing(parse: Any, options: Any) -> None:
    """As frameworks fill them in, and as OpenAI and vLLM take them."""
    body = parse(stream=True, stream_options=options)
    assert not body.include_usage
    assert not body.continuous_usage


@pytest.mark.parametrize("parse", [_chat, _completion])
@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}])
def test_stream_options_need_a_stream(parse: Any, stream: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidField, match="'stream_options' is only allowed when 'stream' is true"
    ) as caught:
        parse(**stream, stream_options={"include_usage": True})
    assert caught.value.param == "stream_options"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [TextPrompt(text="a")]),
        ("", [TextPrompt(text="")]),
        ([1, 2], [TokenPrompt(token_ids=(1, 2))]),
        (["a", "b"], [TextPrompt(text="a"), TextPrompt(text="b")]),
        ([[1], [2, 3]], [TokenPrompt(token_ids=(1,)), TokenPrompt(token_ids=(2, 3))]),
        (["a", [1]], [TextPrompt(text="a"), TokenPrompt(token_ids=(1,))]),
    ],
)
def test_every_form_of_prompt_is_read(prompt: Any, expected: Any) -> None:
    assert list(_completion(prompt=prompt).prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        (1, "prompt"),
        ({}, "prompt"),
        ([-1], "prompt"),
        ([1, -1], "prompt"),
        ([1, 2.0], "prompt"),
        ([1, True], "prompt"),
        ([1, "a"], "prompt"),
        ([1 << 31], "prompt"),
        ([True], "prompt[0]"),
        ([[]], "prompt[0]"),
        (["a", []], "prompt[1]"),
        (["a", [1, "b"]], "prompt[1]"),
        (["a"] * 65, "prompt"),
    ],
)
def test_what_is_no_prompt_is_named(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        _completion(prompt=prompt)
    assert caught.value.param == param


def test_null_counts_as_absent_and_absent_required_fields_are_named() -> None:
    assert _chat(temperature=None, stop=None, max_tokens=None, n=None, logprobs=None).temperature == 1.0
    for name in ("model", "messages"):
        with pytest.raises(InvalidField, match="is required") as caught:
            _chat(**{name: None})
        assert caught.value.param == name


def test_the_newer_name_of_the_limit_wins_and_completions_default_to_16() -> None:
    assert _chat(max_tokens=3, max_completion_tokens=4).token_limit == 4
    assert _chat(max_tokens=3).token_limit == 3
    assert _chat().token_limit is None
    assert _completion().token_limit == 16


def test_log_probabilities_are_asked_for_in_the_endpoints_own_way() -> None:
    assert [_chat(logprobs=asked).num_logprobs for asked in (None, False, True)] == [None, None, 0]
    assert _chat(logprobs=True, top_logprobs=4).num_logprobs == 4
    assert _chat(logprobs=True, top_logprobs=4).num_prompt_logprobs is None
    assert [_completion(logprobs=asked).num_logprobs for asked in (None, False, 0, 3)] == [None, None, 0, 3]
    assert _completion(logprobs=3).num_prompt_logprobs is None
    assert _completion(logprobs=3, echo=True).num_prompt_logprobs == 3
    for wrong in (1, True, "a"):
        with pytest.raises(InvalidField, match="'top_logprobs'"):
            _chat(top_logprobs=wrong)
    with pytest.raises(InvalidField, match="an integer between 0 and 20"):
        _completion(logprobs=True)


def test_nothing_may_be_generated_only_where_the_prompt_comes_back() -> None:
    body = _completion(max_tokens=0, echo=True)
    assert (body.token_limit, body.tells_output) == (1, False)
    assert _completion(max_tokens=1, echo=True).tells_output
    with pytest.raises(InvalidField, match=r"'min_tokens' must be between 0 and max_tokens \(0\)"):
        _completion(max_tokens=0, echo=True, min_tokens=1)
    with pytest.raises(InvalidField, match="or 0 with echo"):
        _completion(max_tokens=0)


def test_biases_become_pairs_in_order_of_their_tokens() -> None:
    assert _chat(logit_bias={"12": 1, "7": -100, "0": 0.5}).logit_bias == ((0, 0.5), (7, -100.0), (12, 1.0))


# Of each kind of value, one that is defined and not neutral.
_DEFINED: tuple[Any, ...] = (
    2,
    0.5,
    True,
    False,
    "auto-matic",
    "low",
    {"type": "json_object"},
    {"7": 1},
    [1],
    ["a"],
)


def _defined(field: Field) -> Any:
    """A value that the API defines for this field and this server does not honour."""
    return next(
        value
        for value in _DEFINED
        if field.domain.contains(value) and not any(_same(value, neutral) for neutral in field.neutral)
    )


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


UNDEFINED: list[tuple[Endpoint, str, Any]] = [
    (endpoint, name, value)
    for endpoint, name, values in (
        (Endpoint.COMPLETIONS, "top_logprobs", [-1, 21, 0.5]),
        (Endpoint.CHAT, "echo", [1]),
    )
    for value in values
]


@pytest.mark.parametrize(("endpoint", "name", "value"), UNDEFINED)
def test_a_refused_fields_value_that_the_api_does_not_define_is_invalid(
    endpoint: Endpoint, name: str, value: Any
) -> None:
    with pytest.raises(InvalidField) as caught:
        refuse_unsupported(endpoint, {name: value})
    assert (caught.value.param, caught.value.code) == (name, "invalid_value")
    assert "must be" in caught.value.message


REFUSED = [field for field in FIELDS if field.use is Use.REFUSED]


@pytest.mark.parametrize("huge", [10**400, -(10**400)])
@pytest.mark.parametrize("field", REFUSED, ids=lambda field: field.name)
def test_a_number_that_no_float_holds_is_refused_like_any_other(field: Field, huge: int) -> None:
    """Whether it is finite cannot be asked of it: that was an OverflowError, and a 500 for the client."""
    for endpoint in field.endpoints:
        for value in (huge, [huge]):
            with pytest.raises((InvalidField, UnsupportedParameter)):
                refuse_unsupported(endpoint, {field.name: value})


@pytest.mark.parametrize("field", REFUSED, ids=lambda field: field.name)
def test_a_refused_field_is_named_and_its_neutral_values_are_accepted(field: Field) -> None:
    for endpoint in field.endpoints:
        with pytest.raises(UnsupportedParameter) as caught:
            refuse_unsupported(endpoint, {field.name: _defined(field)})
        assert caught.value.param == field.name
        assert caught.value.code == "unsupported_parameter"
        for neutral in (None, *field.neutral):
            refuse_unsupported(endpoint, {field.name: neutral})


@pytest.mark.parametrize("field", REFUSED, ids=lambda field: field.name)
def test_what_may_be_sent_is_told_as_json(field: Field) -> None:
    """So that it can be pasted into a body."""
    told = [json.loads(each) for each in field.accepts.split(" or ") if field.neutral]
    assert all(map(_same, told, field.neutral))
    assert len(told) == len(field.neutral)


# What would change the answer where OpenAI or vLLM serve it, and was taken for a field nobody knows.
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moderation", {"model": "omni", "policy": {"input": {"mode": "block"}}}),
        ("thinking_token_budget", 0),
        ("repetition_detection", {"max_pattern_size": 8, "min_count": 3}),
        ("logprob_token_ids", [1, 2]),
        ("watermarking", True),
        ("return_prompt_text", True),
        ("ec_transfer_params", {"do_remote_encode": True}),
    ],
)
def test_what_changes_an_answer_elsewhere_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        _chat(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value", "is_neutral"),
    [
        ("top_logprobs", 0, True),
        ("length_penalty", 1.0, True),
        ("length_penalty", 1.1, False),
    ],
)
def test_neutral_means_what_happens_anyway(name: str, value: Any, is_neutral: bool) -> None:
    if is_neutral:
        refuse_unsupported(Endpoint.COMPLETIONS, {name: value})
    else:
        with pytest.raises(UnsupportedParameter):
            refuse_unsupported(Endpoint.COMPLETIONS, {name: value})


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", True, [], 129, 10**9, 10**30])
def test_n_is_named_with_what_it_takes(n: Any) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_chat({"model": "m", "messages": MESSAGES, "n": n})
    assert (caught.value.param, caught.value.code) == ("n", "invalid_value")
    assert "'n' must be" in caught.value.message


def test_best_of_is_what_is_returned_or_nothing() -> None:
    body = {"model": "m", "prompt": "x", "n": 2}
    assert parse_completion({**body, "best_of": 2}).n == 2
    with pytest.raises(UnsupportedParameter) as caught:
        parse_completion({**body, "best_of": 3})
    assert caught.value.param == "best_of"


def test_all_answers_of_a_body_are_bounded_together() -> None:
    prompts = ["x"] * 64
    assert parse_completion({"model": "m", "prompt": prompts, "n": 2}).n == 2
    with pytest.raises(InvalidField, match="number of prompts must be at most 128"):
        parse_completion({"model": "m", "prompt": prompts, "n": 3})


def test_several_answers_do_not_tell_of_the_prompt() -> None:
    body = {"model": "m", "prompt": "x", "echo": True, "logprobs": 1}
    assert parse_completion(body).n == 1
    with pytest.raises(InvalidField, match="'n' must be 1"):
        parse_completion({**body, "n": 2})


def test_unknown_fields_are_accepted_and_counted() -> None:
    fields = {"model": "m", "messages": MESSAGES, "user": "u", "frobnicate": 1, "x": None}
    assert count_unknown(Endpoint.CHAT, fields) == 2
    assert parse_chat(fields).model == "m"


def test_unknown_stream_options_are_counted_as_unknown_fields_are() -> None:
    options = {"include_usage": None, "include_obfuscation": False, "frobnicate": 1}
    fields = {"model": "m", "messages": MESSAGES, "stream": True, "stream_options": options}
    assert count_unknown(Endpoint.CHAT, fields) == 1
    assert not parse_chat(fields).include_usage
