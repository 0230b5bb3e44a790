"""Log probabilities in answers: whose, in which shape, and none lost where text is held back."""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from tokenizers import decoders

from cache.messages import Delta, FinishReason, Logprobs
from cache.types import ReplicaId
from router.openai_api import codec as codec_module
from router.openai_api.codec import Choice, CompletionCodec, Head, event_stream, whole_answer
from router.openai_api.logprobs import ChatLogprobRecord, CompletionLogprobRecord, LogprobRecord
from router.openai_api.streams import Indexed
from tests.fakes.http import RouterUnderTest, a_replica_info
from tests.fakes.tokenizers import a_tokenizer


def logprobs(*tokens: tuple[float, dict[int, float]]) -> Logprobs:
    top = [pair for _, others in tokens for pair in others.items()]
    return Logprobs(
        num_top=len(tokens[0][1]),
        chosen=array("f", [own for own, _ in tokens]),
        top_ids=array("i", [token for token, _ in top]),
        top=array("f", [logprob for _, logprob in top]),
    )


def told_by(record: LogprobRecord) -> Any:
    due = record.due()
    return None if due is None else json.loads(due)


def one_byte(token_id: int) -> bytes:
    return bytes([token_id])


def test_a_character_in_pieces_is_told_by_its_bytes() -> None:
    """Its place in the text is where the character will be; what breaks one off is behind U+FFFD."""
    heart = "\u2764".encode()
    ids = (*b"a", *heart, *b"b", heart[0], *b"c")
    found = logprobs(*[(-1.0, {})] * len(ids))
    record = CompletionLogprobRecord(one_byte, lambda _id: False)
    record.take(Delta("", ids, 0, None, found))
    told = told_by(record)
    assert told["tokens"] == ["a", r"bytes:\xe2", r"bytes:\x9d", r"bytes:\xa4", "b", r"bytes:\xe2", "c"]
    assert told["text_offset"] == [0, 1, 1, 1, 2, 3, 4]
    assert record.due() is None

    chat = ChatLogprobRecord(one_byte)
    chat.take(Delta("", ids, 0, None, found))
    entries = told_by(chat)["content"]
    assert [entry["token"] for entry in entries][:3] == ["a", r"\xe2", r"\x9d"]
    assert [entry["bytes"] for entry in entries] == [[token] for token in ids]


def test_of_tokens_spelled_alike_the_most_probable_is_told() -> None:
    """SentencePiece has `A` and `<0x41>`. Whether a token was the likeliest is found out with the maximum."""

    def spelled(token_id: int) -> bytes:
        return b"A" if token_id in (1, 2) else b"B"

    for drawn, own in ((1, -0.25), (2, -3.0)):
        record = CompletionLogprobRecord(spelled, lambda _id: False)
        record.take(Delta("A", (drawn,), 0, None, logprobs((own, {1: -0.25, 3: -2.0, 2: -3.0}))))
        told = told_by(record)
        assert told["token_logprobs"] == [own]
        assert told["top_logprobs"] == [{"A": -0.25, "B": -2.0}]


def test_special_tokens_are_told_and_take_no_place_but_where_the_prompt_spells_them() -> None:
    def spelled(token_id: int) -> bytes:
        return b"<s>" if token_id == 0 else bytes([token_id])

    for prompt_text, offsets in (("a", [0, 0, 1]), ("<s>a", [0, 3, 4])):
        record = CompletionLogprobRecord(
            spelled, lambda token: token == 0, prompt=(0, ord("a")), prompt_text=prompt_text
        )
        record.take(Delta("b", (ord("b"),), 0, None, logprobs((-1, {})), logprobs((-2, {}))))
        told = told_by(record)
        assert told["tokens"] == ["<s>", "a", "b"]
        assert told["token_logprobs"] == [None, -2, -1]
        assert told["text_offset"] == offsets


PIECES = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


@pytest.mark.parametrize("shape", ["bytes", "llama legacy", "metaspace first"])
@pytest.mark.parametrize("prompt", ["hello word", " hello", "  or", "é or", " ", "\nus"])
async def test_offsets_are_places_in_the_text_whatever_stands_before_its_first_word(
    shape: str, prompt: str
) -> None:
    """SentencePiece puts a space there: it is part of a token, and not of the prompt that comes back."""
    tokenizer = a_tokenizer(shape)
    if shape != "bytes":
        tokenizer.backend_tokenizer.decoder = PIECES
    prompt_ids, (drawn,) = tokenizer(prompt)["input_ids"], tokenizer.convert_tokens_to_ids(["o"])
    others = logprobs(*[(-1.0, {})] * (len(prompt_ids) - 1)) if len(prompt_ids) > 1 else None
    async with RouterUnderTest(tokenizer=tokenizer) as router:
        router.answer_with(Delta("o", (drawn,), 0, FinishReason.STOP, logprobs((-1.0, {})), others))
        (choice,) = (await router.complete(prompt, echo=True, logprobs=0)).json()["choices"]
    told = choice["logprobs"]
    assert (choice["text"], told["tokens"][-1]) == (f"{prompt}o", "o")
    assert told["text_offset"][-1] == len(prompt)
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        if not token.startswith("bytes:") and offset:
            assert choice["text"].startswith(token, offset)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_tokens", [100, 1_000])
async def test_many_are_written_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, is_stream: bool, num_tokens: int
) -> None:
    """Those of a prompt of 131,072 tokens kept all other answers from going on for 0.7 s and more."""
    found = logprobs(*[(-1.0, {token: -float(token) for token in range(1, 21)})] * num_tokens)
    delta = Delta("x", (1,), 0, FinishReason.STOP, logprobs((-1.0, {1: -1.0})), found)
    threads: set[int] = set()

    def spelled(token_id: int) -> bytes:
        threads.add(threading.get_ident())
        return bytes([token_id])

    async def answered() -> bytes:
        async def deltas() -> AsyncGenerator[Indexed, None]:
            yield Indexed(0, delta)

        record = CompletionLogprobRecord(spelled, lambda _id: False, prompt=[1] * (num_tokens + 1))
        codec, choices = CompletionCodec(Head("id", 1, "m")), [Choice(num_tokens + 1, logprobs=record)]
        if not is_stream:
            return await whole_answer(codec, choices, deltas())
        events = event_stream(codec, choices, deltas(), include_usage=True, continuous_usage=False)
        return b"".join([content async for content in events])

    content = await answered()
    assert (threading.get_ident() in threads) == (num_tokens == 100)
    monkeypatch.setattr(codec_module, "OFFLOAD_LOGPROBS", 1 << 60)
    assert await answered() == content


async def test_what_was_held_back_is_told_with_the_next_chunk(router: RouterUnderTest) -> None:
    router.answer_with(
        Delta("", (97,), 0, None, logprobs((-0.5, {97: -0.5}))),
        Delta("ab", (98,), 0, None, logprobs((-1.5, {99: -0.25}))),
        Delta("", (0,), 0, FinishReason.STOP, logprobs((-2, {0: -2}))),
    )
    response = await router.chat(stream=True, logprobs=True, top_logprobs=1)
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    told = [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks]
    assert [[entry["token"] for entry in entries] for entries in told] == [["a", "b"], ["\0"]]
    assert told[0][1] == {
        "token": "b",
        "bytes": [98],
        "logprob": -1.5,
        "top_logprobs": [{"token": "c", "bytes": [99], "logprob": -0.25}],
    }


async def test_the_drawn_token_is_always_among_a_completions_top(router: RouterUnderTest) -> None:
    router.answer_with(Delta("b", (98,), 0, FinishReason.STOP, logprobs((-1.5, {99: -0.25}))))
    choice = (await router.complete("x", logprobs=1)).json()["choices"][0]
    assert choice["logprobs"] == {
        "text_offset": [0],
        "token_logprobs": [-1.5],
        "tokens": ["b"],
        "top_logprobs": [{"c": -0.25, "b": -1.5}],
    }


async def test_a_prompt_alone_costs_no_completion_token(router: RouterUnderTest) -> None:
    router.answer_with(
        Delta("zzz", (98,), 0, FinishReason.STOP, logprobs((-1, {})), logprobs((-3, {}), (-4, {})))
    )
    body = (await router.complete("exy", logprobs=0, echo=True, max_tokens=0)).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("exy", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -3, -4]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 0
    sampling = router.calls.requests[0][1].sampling
    assert (sampling.max_tokens, sampling.logprobs, sampling.prompt_logprobs) == (1, 0, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", 0.5),
        ("presence_penalty", 1),
        ("frequency_penalty", -1),
        ("repetition_penalty", 2),
        ("logit_bias", {"5": 1}),
        ("logprobs", True),
    ],
)
async def test_a_simulated_model_is_asked_nothing_about_logits(
    router: RouterUnderTest, field: str, value: Any
) -> None:
    simulated = a_replica_info(has_logits=False)
    router.parts.routing.update_replicas({ReplicaId("simulated"): simulated})
    response = await router.chat(**{field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert "simulates" in response.json()["error"]["message"]
