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

from tests.conformance.asking import MESSAGES, assert_refused, chat, complete, metric, unique
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
@pytest.mark.parametrize("n", [129, 10**9])
def test_n_beyond_the_limit_is_refused_by_name(client: openai.OpenAI, n: int) -> None:
    """However large: nothing is allocated for what is refused."""
    _refused(client, complete, "n", n, "must be at most 128")
    assert len(complete(client, n=1).choices) == 1


@row("n > 1")
def test_n_answers(client: openai.OpenAI) -> None:
    answer = chat(client, n=3, temperature=1, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    one = chat(client, temperature=1, seed=1)
    assert answer.choices[0].message.content == one.choices[0].message.content
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens
    assert answer.usage.completion_tokens > one.usage.completion_tokens


@row("n > 1")
def test_n_answers_streamed(client: openai.OpenAI) -> None:
    whole = complete(client, ["The sea", "A hill"], n=2, temperature=1, seed=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts, ends = [""] * 4, [0] * 4
    for chunk in complete(client, ["The sea", "A hill"], n=2, temperature=1, seed=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] += choice.finish_reason is not None
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [1] * 4


def _refused(client: openai.OpenAI, ask: Any, name: str, value: Any, why: str = "must be") -> None:
    """400 that names the field and what it takes."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body={name: value})
    assert (caught.value.param, caught.value.code) == (name, "invalid_value")
    assert f"'{name}' {why}" in caught.value.message


@row("min_p")
def test_min_p_1_is_greedy(client: openai.OpenAI) -> None:
    narrow = complete(client, temperature=1, seed=1, extra_body={"min_p": 1.0})
    assert narrow.choices[0].text == complete(client).choices[0].text
    assert complete(client, temperature=1, seed=1).choices[0].text != narrow.choices[0].text
    for value in (-0.1, 1.1, "0.5", True):
        _refused(client, complete, "min_p", value, "must be a number between 0 and 1")


def _distinct(client: openai.OpenAI, **fields: Any) -> int:
    """Of ten tokens, each of which can only be one of ten."""
    bias = {str(token): 100 for token in range(50, 60)}
    answer = complete(client, max_tokens=10, logprobs=0, logit_bias=bias, extra_body=fields)
    return len(set(answer.choices[0].logprobs.tokens))


def _check_penalty(client: openai.OpenAI, name: str, neutral: float, value: float) -> None:
    """It leads away from what is there already, and its neutral value changes nothing."""
    plain = _distinct(client)
    assert _distinct(client, **{name: neutral}) == plain
    assert _distinct(client, **{name: value}) > plain
    for poison in (-10, 1e9, "1", [1], False):
        _refused(client, complete, name, poison, "must be a number between")


@row("repetition_penalty")
def test_repetition_penalty(client: openai.OpenAI) -> None:
    _check_penalty(client, *PENALTIES[0])


@row("presence_penalty")
def test_presence_penalty(client: openai.OpenAI) -> None:
    _check_penalty(client, *PENALTIES[1])


@row("frequency_penalty")
def test_frequency_penalty(client: openai.OpenAI) -> None:
    _check_penalty(client, *PENALTIES[2])


@row("logprobs (completions)")
def test_logprobs_of_completions(client: openai.OpenAI) -> None:
    answer = complete(client, logprobs=2)
    found = answer.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 8
    assert all(len(top) == 2 for top in found.top_logprobs)
    pairs = zip(found.top_logprobs, found.token_logprobs, strict=True)
    assert all(max(top.values()) == own for top, own in pairs)
    text = answer.choices[0].text
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert text.startswith(token, offset) or token.startswith("bytes:")
    assert complete(client, extra_body={"logprobs": None}).choices[0].logprobs is None
    assert complete(client, extra_body={"logprobs": False}).choices[0].logprobs is None
    assert [len(top) for top in complete(client, logprobs=0).choices[0].logprobs.top_logprobs] == [1] * 8
    for value in (-1, 21, True, 1.5, "2"):
        _refused(client, complete, "logprobs", value, "must be an integer between 0 and 20")


@row("logprobs (completions)")
def test_streamed_logprobs_of_completions_are_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"logprobs": 3, "temperature": 1, "seed": 4, "echo": True}
    whole = complete(client, **asked).choices[0].logprobs
    chunks = [chunk.choices[0].logprobs for chunk in complete(client, **asked, stream=True) if chunk.choices]
    told = [chunk for chunk in chunks if chunk is not None]
    assert [token for chunk in told for token in chunk.tokens] == whole.tokens
    assert [offset for chunk in told for offset in chunk.text_offset] == whole.text_offset
    logprobs = [logprob for chunk in told for logprob in chunk.token_logprobs]
    assert logprobs[0] is None
    assert logprobs[1:] == pytest.approx(whole.token_logprobs[1:], abs=1e-4)


@row("logprobs and top_logprobs (chat)")
def test_logprobs_of_chats(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 8
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in entries)
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)  # greedy
    told = bytes(byte for entry in entries for byte in entry.bytes)
    assert told.decode(errors="replace") == answer.choices[0].message.content
    assert all(not entry.top_logprobs for entry in chat(client, logprobs=True).choices[0].logprobs.content)
    assert chat(client, logprobs=False, extra_body={"top_logprobs": 0}).choices[0].logprobs is None
    _refused(client, chat, "top_logprobs", 3, "is only allowed when 'logprobs' is true")
    for value in (1, "true", 0):
        _refused(client, chat, "logprobs", value, "must be true or false")
    for value in (-1, 21, True):
        _refused(client, chat, "top_logprobs", value, "must be an integer between 0 and 20")


@row("logprobs and top_logprobs (chat)")
def test_streamed_logprobs_of_chats_are_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "temperature": 1, "seed": 4}
    whole = chat(client, **asked).choices[0].logprobs.content
    told = [
        entry
        for chunk in chat(client, **asked, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content
    ]
    assert [entry.token for entry in told] == [entry.token for entry in whole]
    assert [entry.logprob for entry in told] == pytest.approx([entry.logprob for entry in whole], abs=1e-4)


@row("response_format")
def test_a_json_object(server: HttpServer, client: openai.OpenAI) -> None:
    """Nonsense, and an object: from a model that is made to like what closes strings and objects."""
    assert chat(client, response_format={"type": "text"}).choices
    marks = ['"', "}", '":', ":"]
    ids = [httpx.post(f"{server.url}/tokenize", json={"prompt": mark}).json()["tokens"] for mark in marks]
    bias = {str(token_id): 6 for [token_id] in ids}
    asked = {"response_format": {"type": "json_object"}, "temperature": 1, "logit_bias": bias}
    for seed in range(5):
        choice = chat(client, **asked, seed=seed, max_tokens=200).choices[0]
        assert choice.finish_reason == "stop"
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
def test_echo_begins_with_the_prompt(client: openai.OpenAI) -> None:
    plain = complete(client, "The sea").choices[0].text
    assert complete(client, "The sea", echo=True).choices[0].text == "The sea" + plain
    pieces = [chunk.choices[0].text for chunk in complete(client, "The sea", echo=True, stream=True)]
    assert "".join(pieces) == "The sea" + plain


@row("echo, suffix, best_of")
def test_a_prompt_is_scored_whatever_the_cache_holds(client: openai.OpenAI) -> None:
    """As evaluation harnesses ask: the prompt's log probabilities, and no answer at all."""
    prompt = unique()
    first, second = (complete(client, prompt, echo=True, logprobs=1, max_tokens=0) for _ in range(2))
    assert complete(client, prompt).usage.prompt_tokens_details.cached_tokens > 0
    for answer in (first, second):
        found = answer.choices[0].logprobs
        assert answer.choices[0].text == prompt
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 0
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert len(found.tokens) == answer.usage.prompt_tokens
        assert found.token_logprobs[0] is found.top_logprobs[0] is None
        assert all(logprob <= 0 for logprob in found.token_logprobs[1:])
    assert second.choices[0].logprobs.token_logprobs[1:] == pytest.approx(
        first.choices[0].logprobs.token_logprobs[1:], abs=1e-3
    )
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        complete(client, prompt, max_tokens=0)


@row("echo, suffix, best_of")
@pytest.mark.parametrize(("name", "value"), [("suffix", "x"), ("best_of", 2)])
def test_old_fields_are_refused_by_name(client: openai.OpenAI, name: str, value: Any) -> None:
    assert_refused(complete, client, name, value)


@row("logit_bias")
def test_logit_bias_decides(server: HttpServer, client: openai.OpenAI) -> None:
    answer = complete(client, [5] * 20, max_tokens=4, logit_bias={"50": 100})
    only = httpx.post(f"{server.url}/detokenize", json={"tokens": [50] * 4}).json()["prompt"]
    assert answer.choices[0].text == only
    assert chat(client, logit_bias={}).choices
    poison = [{"50": 101}, {"50": "1"}, {"-1": 1}, {"x": 1}, {"050": 1}, {"1" * 30: 1}, [50], "50"]
    for value in poison:
        _refused(client, chat, "logit_bias", value)
    _refused(client, chat, "logit_bias", {"999999": 1}, "must have ids between 0 and")
    _refused(client, chat, "logit_bias", {str(i): 1 for i in range(1025)}, "must have at most 1024")


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
def test_priority_has_a_range(client: openai.OpenAI) -> None:
    for priority in (-10, 0, 10):
        assert chat(client, extra_body={"priority": priority}).choices
        assert complete(client, extra_body={"priority": priority}).choices
    for priority in (-11, 11, 1.5, "0"):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, extra_body={"priority": priority})
        assert (caught.value.param, caught.value.code) == ("priority", "invalid_value")
