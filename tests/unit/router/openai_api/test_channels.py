"""Messages in channels are told apart, in text however it is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cache.messages import FinishReason, GenerateRequest
from router.openai_api.channels import ChannelReader, has_channels
from router.openai_api.pieces import Piece
from tests.fakes.http import MODEL, RouterUnderTest, error_of, events_of
from tests.fakes.tokenizers import CHATML, HARMONY, HARMONY_TOKENS, HERMES, THINKING, a_tokenizer

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"place": "Ulm"}'
ARGUMENTS = '{"place": "Ulm"}'
EARLY = ' to=functions.weather<|channel|>commentary json<|message|>{"place": "Ulm"}'  # as templates write it
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {}}}

# What is written; thought, text, arguments of calls.
CASES: list[tuple[str, str, str, list[str]]] = [
    (f"{ANALYSIS}User says hi.{NEXT}{FINAL}Hello!<|return|>", "User says hi.", "Hello!", []),
    (f"{FINAL}Hello!", "", "Hello!", []),
    (f"{ANALYSIS}cut off", "cut off", "", []),
    (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c{NEXT}{FINAL}d", "a\nb", "c\nd", []),
    (f"{ANALYSIS}hm{NEXT}{CALL}<|call|>", "hm", "", ['{"place": "Ulm"}']),
    (f"{ANALYSIS}hm{NEXT}{CALL}", "hm", "", ['{"place": "Ulm"}']),  # its end ended the answer
    (f"{EARLY}<|call|>", "", "", ['{"place": "Ulm"}']),
    (f"{CALL}<|call|><|start|>assistant{EARLY}", "", "", ['{"place": "Ulm"}'] * 2),
    (CALL.replace("commentary", "analysis"), "", "", ['{"place": "Ulm"}']),
    (f"<|channel|>commentary<|message|>I look.{NEXT}{CALL}", "", "I look.", ['{"place": "Ulm"}']),
    (CALL.removesuffix('m"}'), "", '{"place": "Ul', []),  # a call gone wrong is text
    (CALL.replace('{"place": "Ulm"}', "[]"), "", "[]", []),
    ("Hello", "", "Hello", []),
    ("a < b <| c", "", "a < b <| c", []),
    ("", "", "", []),
    ("<|chan", "", "", []),
    ("<|channel|>anal", "", "", []),
    (f"{ANALYSIS}a<|channel|>final<|message|>b", "a", "b", []),  # an end that was left out
    (f"{FINAL}a <|message|> b <|en", "", "a <|message|> b <|en", []),
    ("<|channel|>" + "a" * 300 + "<|message|>b", "", "<|channel|>" + "a" * 300 + "<|message|>b", []),
    ("<|channel|>python to=python code<|message|>1", "", "1", []),
]


def numbered(**options: Any) -> ChannelReader:
    numbers = iter(range(1000))
    return ChannelReader(finds_calls=True, new_id=lambda: f"call_{next(numbers)}", **options)


def read(reader: ChannelReader, parts: Sequence[str], ending: FinishReason = FinishReason.STOP) -> Piece:
    """Everything that came out, put together."""
    pieces = [
        reader.read(part, ending if index + 1 == len(parts) else None) for index, part in enumerate(parts)
    ]
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(call for piece in pieces for call in piece.calls),
        "".join(piece.thought for piece in pieces),
    )


@pytest.mark.parametrize(("written", "thought", "text", "arguments"), CASES)
def test_each_message_is_what_its_header_says(
    written: str, thought: str, text: str, arguments: list[str]
) -> None:
    for parts in [written], list(written) or [""], [written, ""]:
        piece = read(numbered(), parts)
        assert (piece.thought, piece.text) == (thought, text)
        assert [(call.name, call.arguments) for call in piece.calls] == [("weather", a) for a in arguments]


@pytest.mark.parametrize("written", [CALL, EARLY])
def test_an_answer_cut_off_in_a_call_has_the_arguments_so_far(written: str) -> None:
    for left in range(len(ARGUMENTS)):
        so_far = ARGUMENTS[: len(ARGUMENTS) - left]
        cut = f"{ANALYSIS}hm{NEXT}{written.removesuffix(ARGUMENTS)}{so_far}"
        piece = read(numbered(), [cut], FinishReason.LENGTH)
        assert (piece.thought, piece.text) == ("hm", "")
        assert [(call.name, call.arguments) for call in piece.calls] == [("weather", so_far.rstrip())]


@pytest.mark.parametrize("so_far", ["", "[1, ", "{place", '{"place": "Ulm"} x', '{"place": "Ulm" x'])
def test_what_is_cut_off_and_begins_no_object_is_text(so_far: str) -> None:
    cut = CALL.replace(ARGUMENTS, so_far)
    assert read(numbered(), [cut], FinishReason.LENGTH) == Piece(so_far.rstrip())


def test_a_call_that_ended_before_the_cut_was_not_cut_off() -> None:
    """What ended and is no object is a call gone wrong, also in an answer that is cut off later."""
    so_far = '{"place": "Ulm"'
    written = CALL.replace(ARGUMENTS, so_far) + NEXT + ANALYSIS + "hm"
    piece = read(numbered(), [written], FinishReason.LENGTH)
    assert (piece.text, piece.calls) == (so_far, ())


_PARTS = [ANALYSIS, FINAL, NEXT, CALL, EARLY, "<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"]
_WRITTEN = st.lists(
    st.sampled_from([*_PARTS, "<|message|>", "<|", "<", " ", "\n", "a", "to=", "é", "b" * 150]), max_size=12
).map("".join)


@given(_WRITTEN | st.sampled_from([case[0] for case in CASES]), st.booleans(), st.data())
def test_cuts_change_nothing(text: str, is_parallel: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(numbered(is_parallel=is_parallel), parts) == read(numbered(is_parallel=is_parallel), [text])


@given(_WRITTEN.filter(lambda text: "functions" not in text))
@example(f"{ANALYSIS}hm <|en")
def test_nothing_waits_but_a_tags_beginning_or_a_header(text: str) -> None:
    """What has come is never taken back."""
    so_far, ended = numbered().read(text, None), numbered().read(text, FinishReason.STOP)
    for came, whole in ((so_far.thought, ended.thought), (so_far.text, ended.text)):
        assert whole.startswith(came)
        waits = whole.removeprefix(came)
        assert any(tag.startswith(waits) and tag != waits for tag in _PARTS[5:])


def test_calls_are_text_where_none_are_looked_for() -> None:
    piece = ChannelReader(finds_calls=False).read(f"{ANALYSIS}hm{NEXT}{CALL}<|call|>", FinishReason.STOP)
    assert piece == Piece('{"place": "Ulm"}', (), "hm")


def test_only_the_first_call_counts_where_they_are_not_parallel() -> None:
    piece = read(numbered(is_parallel=False), [f"{CALL}<|call|><|start|>assistant{EARLY}<|call|>{FINAL}x"])
    assert (len(piece.calls), piece.text) == (1, "")


def test_it_is_told_from_the_template() -> None:
    assert has_channels(HARMONY)
    for template in (CHATML, HERMES, THINKING, None):
        assert not has_channels(template)


# --- over HTTP ------------------------------------------------------------------------------------


def a_router(*texts: str, finish: FinishReason = FinishReason.STOP) -> RouterUnderTest:
    """A Router of a model of that kind, that answers these texts, one delta each."""
    tokenizer = a_tokenizer("bytes", added=HARMONY_TOKENS, template=HARMONY)
    router = RouterUnderTest(tokenizer=tokenizer, max_model_len=4096)
    router.say(*texts, finish=finish)
    return router


def sent(router: RouterUnderTest) -> GenerateRequest:
    return router.calls.requests[-1][1]


async def test_an_answer_is_asked_for_with_its_special_tokens_and_read() -> None:
    async with a_router(f"{ANALYSIS}User says", f" hi.{NEXT}{FINAL}", "Hello!") as router:
        choice = (await router.chat("Hi")).json()["choices"][0]
        assert choice["message"] == {
            "role": "assistant",
            "content": "Hello!",
            "reasoning_content": "User says hi.",
            "refusal": None,
        }
        assert choice["finish_reason"] == "stop"
        assert not sent(router).sampling.skip_special_tokens


async def test_streaming_equals_not_streaming() -> None:
    async with a_router(*f"{ANALYSIS}hm{NEXT}{FINAL}I look.{NEXT}{CALL}") as router:
        whole = (await router.chat("Hi", tools=[WEATHER])).json()["choices"][0]
        streamed = await router.chat("Hi", tools=[WEATHER], stream=True)
    choices = [json.loads(event)["choices"][0] for event in events_of(streamed.content)[:-1]]
    deltas, message = [choice["delta"] for choice in choices], whole["message"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == "tool_calls"
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"] == "I look."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls == [call["function"] for call in message["tool_calls"]]
    assert calls == [{"name": "weather", "arguments": '{"place": "Ulm"}'}]


async def test_a_conversation_goes_on_with_its_thoughts() -> None:
    """Which the template calls otherwise; where a call has both, it has a place for one."""
    calls = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]
    async with a_router(f"{FINAL}ok") as router:
        for content, before in ((None, "so"), ("I look.", "I look.")):
            turn = {"role": "assistant", "content": content, "reasoning_content": "so", "tool_calls": calls}
            messages = [
                {"role": "user", "content": "Hi"},
                turn,
                {"role": "tool", "content": "1", "tool_call_id": "c"},
            ]
            body = {"model": MODEL, "messages": messages, "tools": [WEATHER]}
            answer = await router.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            prompt = router.tokenizer.decode(list(sent(router).token_ids))
            assert f"{ANALYSIS}{before}{NEXT} to=functions.weather<|channel|>commentary" in prompt


@pytest.mark.parametrize(
    ("fields", "written", "content"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}', '{"a": 1}'),
        (
            {"tools": [WEATHER], "tool_choice": "required"},
            '<tool_call>{"name": "weather", "arguments": {}}</tool_call>',
            None,
        ),
    ],
)
async def test_an_answer_that_is_constrained_has_no_channels(
    fields: dict[str, Any], written: str, content: str | None
) -> None:
    async with a_router(written) as router:
        message = (await router.chat("Hi", **fields)).json()["choices"][0]["message"]
        assert (message["content"], "reasoning_content" in message) == (content, False)
        assert [call["function"]["name"] for call in message.get("tool_calls", [])] == (
            ["weather"] if "tools" in fields else []
        )
        assert sent(router).sampling.skip_special_tokens
        assert sent(router).structure is not None


async def test_calls_that_cannot_be_held_to_anything_are_refused() -> None:
    strict = {"type": "function", "function": {"name": "sea", "strict": True}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [WEATHER]}}
    async with a_router(f"{FINAL}ok") as router:
        for fields, param in (
            ({"tools": [WEATHER, strict]}, "tools[1].function.strict"),
            ({"tools": [WEATHER], "tool_choice": allowed}, "tool_choice"),
        ):
            error = error_of(await router.chat("Hi", **fields))
            assert (error["param"], error["code"]) == (param, "unsupported_parameter")
        answer = await router.chat("Hi", tools=[WEATHER, strict], tool_choice="none")
        assert answer.json()["choices"][0]["message"]["content"] == "ok"


async def test_other_models_texts_are_without_special_tokens() -> None:
    async with RouterUnderTest() as router:
        await router.chat("Hi")
        assert sent(router).sampling.skip_special_tokens
        await router.complete("Hi")
        assert sent(router).sampling.skip_special_tokens
