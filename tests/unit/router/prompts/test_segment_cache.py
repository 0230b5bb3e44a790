"""The segment cache: what it saves, what it keeps apart, how much it holds."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from router.prompts.chat import Chat
from router.prompts.prompt import PromptEncoder
from router.prompts.segment_cache import DEFAULT_CACHE_BYTES, SegmentCache
from router.prompts.segments import SegmentRule, segment_rule
from tests.fakes.router import config
from tests.fakes.tokenizers import a_tokenizer


class Watched:
    """A rule that notes what is really tokenized."""

    def __init__(self) -> None:
        tokenizer = a_tokenizer("bytes")
        tokenizer("")
        rule = segment_rule(tokenizer)
        assert isinstance(rule, SegmentRule)
        self.tokenized: list[str] = []
        self.plain = rule.encode
        self.rule = SegmentRule(rule.segmenter, self._encode, rule.prefix, rule.suffix)

    def _encode(self, text: str) -> list[int]:
        self.tokenized.append(text)
        return self.plain(text)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def ids(cache: SegmentCache, text: str, salt: str = "") -> list[int]:
    return list(cache.finish(cache.begin(text, salt), add_special_tokens=False))


def turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def test_a_turn_costs_only_what_is_new_in_it(watched: Watched) -> None:
    cache = SegmentCache(watched.rule)
    first = turn("system", "Be brief.") + turn("user", "Hello")
    begun = "<|im_start|>assistant\n"
    ids(cache, first + begun)
    watched.tokenized.clear()
    second = first + turn("assistant", "Hi!") + turn("user", "And now?") + begun
    assert ids(cache, second) == watched.plain(second)
    assert watched.tokenized == ["<|im_start|>assistant\nHi!", "<|im_start|>user\nAnd now?"]
    watched.tokenized.clear()
    assert ids(cache, second) == watched.plain(second)
    assert watched.tokenized == []


def test_a_segment_that_occurs_twice_is_tokenized_once(watched: Watched) -> None:
    cache = SegmentCache(watched.rule)
    ids(cache, turn("user", "a") * 5)
    assert watched.tokenized == ["<|im_start|>user\na", "<|im_end|>\n"]


def test_salts_share_nothing(watched: Watched) -> None:
    """Else one tenant could tell by the clock what another has sent."""
    cache = SegmentCache(watched.rule)
    secret = turn("user", "the password is 1234")
    ids(cache, secret, salt="tenant a")
    watched.tokenized.clear()
    begun = cache.begin(secret, "tenant b")
    assert begun.missing_chars == len(secret)
    ids(cache, secret, salt="tenant b")
    assert len(watched.tokenized) == 2
    assert cache.begin(secret, "tenant a").missing_chars == 0


def test_the_least_recently_used_goes_first(watched: Watched) -> None:
    texts = [f"<|im_start|>{number:03}" for number in range(20)]
    cache = SegmentCache(watched.rule, max_bytes=4000)
    for text in texts:
        ids(cache, text)
        ids(cache, texts[0])  # in use all the time
    kept = [text for text in texts if cache.begin(text, "").missing_chars == 0]
    assert texts[0] in kept
    assert kept[1:] == texts[-len(kept) + 1 :]
    assert 5 < len(kept) < 20
    assert cache.statistics().evicted_entries == 20 - len(kept)


def test_a_segment_of_half_the_room_is_not_kept(watched: Watched) -> None:
    cache = SegmentCache(watched.rule, max_bytes=100_000)
    ids(cache, "<|im_start|>small")
    ids(cache, "<|im_start|>" + "large " * 5000)
    assert cache.statistics().num_entries == 1
    assert cache.begin("<|im_start|>small", "").missing_chars == 0


@pytest.mark.parametrize("salt_chars", [0, 1024])
def test_bytes_are_what_the_process_grows_by(watched: Watched, salt_chars: int) -> None:
    """Salts, too: clients choose them, a new one for each request if they like."""
    cache = SegmentCache(watched.rule, max_bytes=1 << 30)
    tracemalloc.start()
    try:
        for number in range(2000):
            salt = f"{number:0{salt_chars}}" if salt_chars else ""
            ids(cache, f"<|im_start|>user {number} " + "word " * (number % 50), salt)
            watched.tokenized.clear()
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert cache.statistics().num_bytes == pytest.approx(grown, rel=0.15)


def test_statistics_count_tokens(watched: Watched) -> None:
    cache = SegmentCache(watched.rule)
    number = len(ids(cache, turn("user", "one")))
    ids(cache, turn("user", "one"))
    numbers = cache.statistics()
    assert (numbers.tokenized_tokens, numbers.reused_tokens) == (number, number)
    assert numbers.num_entries == 2


def test_the_setting_and_the_cache_agree_on_the_room() -> None:
    assert config().tokenization_cache_bytes == DEFAULT_CACHE_BYTES


def test_many_threads_share_one_cache() -> None:
    tokenizer = a_tokenizer("bytes")
    encoder = PromptEncoder(tokenizer, name="m", cache_bytes=20_000)

    def chat(number: int) -> list[int]:
        messages = [{"role": "user", "content": f"question {n % 7}"} for n in range(number % 11 + 1)]
        return list(encoder.chat(Chat(messages)))

    alone: list[Any] = [chat(number) for number in range(300)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(chat, range(300))) == alone
    encoder.close()
