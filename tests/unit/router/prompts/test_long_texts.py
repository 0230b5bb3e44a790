"""Texts that would take a Router's memory: who is refused early, who is not, and one of them at a time."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from cache import heap
from router.errors import InvalidField, PromptFarTooLong
from router.prompts.chat import Chat
from router.prompts.long_texts import LARGE_CHARS, PART_CHARS, LongTexts
from router.prompts.prompt import PromptEncoder
from tests.fakes.http import ByteTokenizer

TINY = str(Path(__file__).parents[4] / "replica" / "models" / "tiny")


class Counted(ByteTokenizer):
    """Says how much it was given."""

    num_chars = 0

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        self.num_chars += len(text)
        return super().__call__(text, **kwargs)


def long_tokens(num_chars: int) -> PreTrainedTokenizerFast:
    """Its longest token has so many characters, a power of two; nothing cuts a text before."""
    pieces = ["a" * 2**power for power in range(num_chars.bit_length())]
    merges = [(piece, piece) for piece in pieces[:-1]]
    vocab = {piece: index for index, piece in enumerate([*pieces, "b"])}
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("limit", [16, 4096, 10_000])
def test_of_what_is_far_too_long_the_beginning_is_tokenized(limit: int) -> None:
    tokenizer = Counted()
    encoder = PromptEncoder(tokenizer, name="bytes")
    with pytest.raises(PromptFarTooLong, match=f"is {limit} tokens.*Shorten the prompt") as refused:
        encoder.text("x" * 3_000_000, param="prompt[3]", limit=limit)
    assert (refused.value.param, refused.value.code) == ("prompt[3]", "context_length_exceeded")
    assert tokenizer.num_chars <= PART_CHARS
    with pytest.raises(PromptFarTooLong) as refused:
        encoder.chat(Chat([{"role": "user", "content": "x" * 3_000_000}]), limit=limit)
    assert refused.value.param == "messages"
    assert tokenizer.num_chars <= 2 * PART_CHARS
    encoder.close()


def test_so_is_a_chats_that_is_tokenized_by_segment() -> None:
    encoder = PromptEncoder.load(TINY)
    assert encoder.whole_reason is None
    with pytest.raises(PromptFarTooLong):
        encoder.chat(Chat([{"role": "user", "content": "sea " * 100_000}]), limit=512)
    assert encoder.chat(Chat([{"role": "user", "content": "sea " * 10_000}]), limit=512)  # told exactly
    encoder.close()


def test_half_a_surrogate_pair_is_named_in_a_long_text_too() -> None:
    encoder = PromptEncoder.load(TINY)
    with pytest.raises(InvalidField, match="'prompt' is not valid Unicode") as refused:
        encoder.text("\ud800" * 100_000, limit=16)
    assert not isinstance(refused.value, PromptFarTooLong)
    encoder.close()


@pytest.mark.parametrize("token_chars", [16, 128, 256])
@pytest.mark.parametrize("before", ["", "b", "b" + "a" * 77 + "b"])
def test_nobody_is_refused_who_fits(token_chars: int, before: str) -> None:
    """However its tokens lie to the cuts."""
    encoder = PromptEncoder(long_tokens(token_chars), name="long")
    text = before + "a" * (4 * PART_CHARS + 3)
    limit = len(encoder.text(text))
    assert len(text) > 8 * limit  # it is looked at
    assert len(encoder.text(text, limit=limit)) == limit
    with pytest.raises(PromptFarTooLong):
        encoder.text(text, limit=limit // 3)
    encoder.close()


def test_nobody_is_looked_at_where_no_limit_is_known() -> None:
    encoder = PromptEncoder(ByteTokenizer(), name="bytes")
    assert len(encoder.text("x" * 200_000)) == 200_000
    encoder.close()


@pytest.mark.parametrize(("num_chars", "at_once"), [(LARGE_CHARS + 1, 1), (LARGE_CHARS, 2)])
def test_one_large_text_at_a_time(monkeypatch: pytest.MonkeyPatch, num_chars: int, at_once: int) -> None:
    """And what it took is given back before the next one begins."""
    inside: list[int] = []
    given_back: list[int] = []
    monkeypatch.setattr(heap, "give_back", lambda: given_back.append(len(inside)))
    texts, met, most = LongTexts(len), threading.Barrier(2), 0

    def tokenize() -> None:
        nonlocal most
        with texts.turn("x" * num_chars, None, "prompt"):
            inside.append(1)
            most = max(most, len(inside))
            with contextlib.suppress(threading.BrokenBarrierError):  # the other one did not come in
                met.wait(60 if at_once == 2 else 0.3)
            inside.pop()

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(tokenize) for _ in range(2)]:
            done.result()
    assert most == at_once
    assert given_back == ([0, 0] if at_once == 1 else [])
