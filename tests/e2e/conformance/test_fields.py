"""Fields of the schemas that are not behaviour yet: neutral values taken, others refused by name."""

from __future__ import annotations

import json
import re
import uuid
from typing import Annotated, Any, Literal

import httpx
import openai
import pydantic
import pytest

from tests.conformance.asking import MESSAGES, assert_refused, chat, complete, metric
from tests.conformance.rows import row
from tests.http_server import MODEL, HttpServer

PENALTIES = [("repetition_penalty", 1.0, 1.5), ("presence_penalty", 0, 1.5), ("frequency_penalty", 0.0, 1.5)]


@row("unknown fields are accepted and counted")
def test_unknown_fields(server: HttpServer, client: openai.OpenAI) -> None:
    before = metric(server, "warmpath_unknown_fields_total")
    names = [uuid.uuid4().hex for _ in range(5)]
    for name in names:
        chat(client, extra_body={name: 1})
    assert metric(server, "warmpath_unknown_fields_total") == before + 5
    text = httpx.get(f"{server.url}/metrics").text
    assert not [name for name in names if name in text]  # the names become no labels


@row("n > 1")
@pytest.mark.parametrize("n", [2, 16, 10**9])
def test_n_is_refused_by_name(client: openai.OpenAI, n: int) -> None:
    """However large: nothing is allocated for what is refused."""
    assert_refused(complete, client, "n", n)
    assert len(complete(client, n=1).choices) == 1


@row("n > 1")
@pytest.mark.xfail(raises=openai.BadRequestError, reason="one answer per prompt", strict=True)
def test_n_answers(client: openai.OpenAI) -> None:
    answer = chat(client, n=3, temperature=1, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3


@row("min_p")
def test_min_p_is_refused_by_name(client: openai.OpenAI) -> None:
    assert_refused(complete, client, "min_p", 0.1)
    assert complete(client, extra_body={"min_p": 0}).choices


@row("min_p")
@pytest.mark.xfail(raises=openai.BadRequestError, reason="the sampler has no min_p", strict=True)
def test_min_p_1_is_greedy(client: openai.OpenAI) -> None:
    narrow = complete(client, temperature=1, extra_body={"min_p": 1.0})
    assert narrow.choices[0].text == complete(client).choices[0].text


def _check_penalty(client: openai.OpenAI, name: str, neutral: float, value: float) -> None:
    assert complete(client, extra_body={name: neutral}).choices
    assert_refused(complete, client, name, value)
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, extra_body={name: -10})
    assert (caught.value.param, caught.value.code) == (name, "invalid_value")


@row("repetition_penalty")
def test_repetition_penalty_is_refused_by_name(client: openai.OpenAI) -> None:
    _check_penalty(client, *PENALTIES[0])


@row("presence_penalty")
def test_presence_penalty_is_refused_by_name(client: openai.OpenAI) -> None:
    _check_penalty(client, *PENALTIES[1])


@row("frequency_penalty")
def test_frequency_penalty_is_refused_by_name(client: openai.OpenAI) -> None:
    _check_penalty(client, *PENALTIES[2])


def _distinct(text: str) -> float:
    words = text.split()
    return len(set(words)) / len(words)


def _check_less_repetition(client: openai.OpenAI, name: str, value: float) -> None:
    plain = complete(client, "la la la la la", max_tokens=64).choices[0].text
    penalised = complete(client, "la la la la la", max_tokens=64, extra_body={name: value}).choices[0].text
    assert _distinct(penalised) > _distinct(plain)


@row("repetition_penalty")
@pytest.mark.xfail(raises=openai.BadRequestError, reason="the sampler has no penalties", strict=True)
def test_repetition_penalty(client: openai.OpenAI) -> None:
    _check_less_repetition(client, "repetition_penalty", 1.5)


@row("presence_penalty")
@pytest.mark.xfail(raises=openai.BadRequestError, reason="the sampler has no penalties", strict=True)
def test_presence_penalty(client: openai.OpenAI) -> None:
    _check_less_repetition(client, "presence_penalty", 1.5)


@row("frequency_penalty")
@pytest.mark.xfail(raises=openai.BadRequestError, reason="the sampler has no penalties", strict=True)
def test_frequency_penalty(client: openai.OpenAI) -> None:
    _check_less_repetition(client, "frequency_penalty", 1.5)


@row("logprobs (completions)")
def test_logprobs_of_completions_are_refused_by_name(client: openai.OpenAI) -> None:
    assert complete(client, extra_body={"logprobs": None}).choices[0].logprobs is None
    for value in (0, 1, 5):
        assert_refused(complete, client, "logprobs", value)


@row("logprobs (completions)")
@pytest.mark.xfail(raises=openai.BadRequestError, reason="the engine returns no logprobs", strict=True)
def test_logprobs_of_completions(client: openai.OpenAI) -> None:
    found = complete(client, logprobs=2).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == 8
    assert all(len(top) == 2 for top in found.top_logprobs)


@row("logprobs and top_logprobs (chat)")
def test_logprobs_of_chats_are_refused_by_name(client: openai.OpenAI) -> None:
    assert chat(client, logprobs=False, extra_body={"top_logprobs": 0}).choices[0].logprobs is None
    assert_refused(chat, client, "logprobs", True)
    assert_refused(chat, client, "top_logprobs", 3)


@row("logprobs and top_logprobs (chat)")
@pytest.mark.xfail(raises=openai.BadRequestError, reason="the engine returns no logprobs", strict=True)
def test_logprobs_of_chats(client: openai.OpenAI) -> None:
    entries = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(entries) == 8
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in entries)


@row("response_format")
def test_a_json_object(client: openai.OpenAI) -> None:
    """Nonsense, and an object where it is not cut off, as it mostly is."""
    assert chat(client, response_format={"type": "text"}).choices
    asked = {"response_format": {"type": "json_object"}, "temperature": 2, "max_tokens": 12}
    for choice in (chat(client, **asked, seed=seed).choices[0] for seed in range(8)):
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


class Invoice(pydantic.BaseModel):
    number: Annotated[int, pydantic.Field(ge=1000, le=9999)]
    currency: Literal["EUR", "USD", "JPY"]
    paid: bool
    lines: Annotated[list[Annotated[str, pydantic.Field(max_length=8)]], pydantic.Field(max_length=3)]


@row("response_format")
def test_an_answer_is_parsed_into_what_it_was_to_be(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Invoice, temperature=1, seed=seed, max_tokens=400
        )
        assert isinstance(answer.choices[0].message.parsed, Invoice)
        assert answer.choices[0].finish_reason == "stop"


@row("response_format")
def test_a_streamed_answer_is_parsed_too(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Invoice, temperature=1, seed=5, max_tokens=400
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Invoice)


@row("response_format")
def test_a_schema_that_cannot_be_followed_is_refused_with_its_place(client: openai.OpenAI) -> None:
    items = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    schema = {"name": "x", "strict": True, "schema": {"type": "object", "properties": {"ids": items}}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        chat(client, response_format={"type": "json_schema", "json_schema": schema})
    assert (caught.value.param, caught.value.code) == ("response_format", "invalid_value")
    assert "#/properties/ids" in caught.value.message


@row("echo, suffix, best_of")
@pytest.mark.parametrize(("name", "value"), [("echo", True), ("suffix", "x"), ("best_of", 2)])
def test_old_fields_are_refused_by_name(client: openai.OpenAI, name: str, value: Any) -> None:
    assert_refused(complete, client, name, value)


@row("logit_bias")
def test_logit_bias_is_refused_by_name(client: openai.OpenAI) -> None:
    assert chat(client, logit_bias={}).choices
    assert_refused(chat, client, "logit_bias", {"50": 10})


@row("logit_bias")
@pytest.mark.xfail(raises=openai.BadRequestError, reason="the sampler has no logit_bias", strict=True)
def test_logit_bias_decides(server: HttpServer, client: openai.OpenAI) -> None:
    answer = complete(client, [5] * 20, max_tokens=4, logit_bias={"50": 100})
    only = httpx.post(f"{server.url}/detokenize", json={"tokens": [50] * 4}).json()["prompt"]
    assert answer.choices[0].text == only


@row("structured_outputs")
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "[a-c]{2}-[0-9]{3}"}}, "[a-c]{2}-[0-9]{3}"),
        ({"structured_outputs": {"json": {"enum": [7, "seven"]}}}, '7|"seven"'),
        ({"structured_outputs": {"grammar": 'start: "(" ("a" | "b") ")"'}}, r"\([ab]\)"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_regex": "x{3,5}"}, "x{3,5}"),
        ({"guided_json": '{"type": "boolean"}'}, "true|false"),
        ({"guided_grammar": 'root ::= "1" | "2"'}, "1|2"),
    ],
    ids=str,
)
def test_structured_outputs(client: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    for answer in (
        chat(client, extra_body=fields, temperature=1, seed=3, max_tokens=32).choices[0].message.content,
        complete(client, extra_body=fields, temperature=1, seed=4, max_tokens=32).choices[0].text,
    ):
        assert re.fullmatch(pattern, answer)


@row("priority")
def test_priority_is_refused_by_name(client: openai.OpenAI) -> None:
    assert chat(client, extra_body={"priority": 0}).choices
    assert_refused(chat, client, "priority", 1)
