"""Texts so long that a tokenizer takes hundreds of megabytes for them.

It takes up to 200 bytes of memory for each of a text's while it is at it, and glibc keeps most of them: 640
MB for 4 MB of text, which a client may send. So what is far too long for the model is found by its beginning,
of the rest one is tokenized at a time, and what that took is given back.

Knows texts and how many tokens they have; knows neither tokenizers nor requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cache import heap
from router.errors import PromptFarTooLong

PART_CHARS = 1 << 16
LARGE_CHARS = 1 << 20  # of which one is tokenized at a time
# More characters for each token that fits are seldom what was meant. Where they are (spaces, say) the text is
# tokenized twice.
_CHARS_PER_TOKEN = 8


class LongTexts:
    """Whoever tokenizes a text takes a `turn`, which is none where it is short. Safe from several threads."""

    def __init__(self, count: Callable[[str], int]) -> None:
        """count: how many tokens a text has. Raises TypeError where it is not valid Unicode."""
        self._count = count
        self._lock = threading.Lock()  # held by whoever tokenizes what is large

    @contextmanager
    def turn(self, text: str, limit: int | None, param: str) -> Iterator[None]:
        """limit: tokens that fit the model; None = nobody asks.

        Raises PromptFarTooLong, and what `count` raises.
        """
        if limit is not None:
            self._check(text, limit, param)
        if len(text) <= LARGE_CHARS:
            yield
            return
        with self._lock:
            try:
                yield
            finally:
                heap.give_back()

    def _check(self, text: str, limit: int, param: str) -> None:
        """Part by part: cutting adds to the number of tokens only where it goes through one.

        Of a text that is this long and fits, tokens have more than eight characters on average. As long as
        none has more than 256, cutting adds less than the limit to their number.
        """
        if len(text) <= max(PART_CHARS, _CHARS_PER_TOKEN * limit):
            return
        num_tokens = 0
        for begin in range(0, len(text), PART_CHARS):
            num_tokens += self._count(text[begin : begin + PART_CHARS])
            if num_tokens > 2 * limit:
                raise PromptFarTooLong(limit, param=param)
