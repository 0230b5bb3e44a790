"""Log probabilities as the two endpoints tell them, kept until the next chunk takes them along.

A token is told as its text. One that is no whole character by itself (a byte of an emoji, say) is told by its
bytes, escaped, as the API does: `\\xf0\\x9f` in chats, `bytes:\\xf0\\x9f` in completions. Chats also have the
bytes themselves: those of an answer's tokens, one after another, are its text and what is left out of it,
special tokens and what a stop string cuts off.

Knows token ids, their bytes and packed numbers; knows neither deltas' text nor how chunks are sent.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from cache.messages import Delta, Logprobs
from router.openai_api.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)

TokenBytes = Callable[[int], bytes]
_CONTINUATIONS = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))  # of UTF-8: they begin no character


class LogprobRecord(Protocol):
    """One choice's. Each token goes in once and comes out once."""

    def take(self, delta: Delta) -> None:
        """Take in what a delta tells."""

    def due(self) -> ChatLogprobs | CompletionLogprobs | None:
        """What was taken in since the last call; None if nothing was. Changes state."""


class NoLogprobs:
    """Of a choice whose request did not ask."""

    def take(self, delta: Delta) -> None:
        pass

    def due(self) -> None:
        return None


class ChatLogprobRecord:
    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._entries: list[ChatTokenLogprob] = []

    def take(self, delta: Delta) -> None:
        if delta.logprobs is None:
            return
        for token_id, logprob, top in _each(delta.token_ids, delta.logprobs):
            others = [self._told(other, other_logprob) for other, other_logprob in top]
            told = self._told(token_id, logprob)
            entry = ChatTokenLogprob(token=told.token, bytes=told.bytes, logprob=logprob, top_logprobs=others)
            self._entries.append(entry)

    def _told(self, token_id: int, logprob: float) -> TopLogprob:
        spelled = self._token_bytes(token_id)
        text = _decoded(spelled)
        shown = _escaped(spelled) if text is None else text
        return TopLogprob(token=shown, bytes=list(spelled), logprob=logprob)

    def due(self) -> ChatLogprobs | None:
        entries, self._entries = self._entries, []
        return ChatLogprobs(content=entries, refusal=None) if entries else None


class CompletionLogprobRecord:
    """Also where each token's text begins: characters of the choice's text before it."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        is_special: Callable[[int], bool],
        *,
        prompt: Sequence[int] = (),
        prompt_text: str = "",
        tells_output: bool = True,
    ) -> None:
        """is_special: whether a token is no part of an answer's text.

        prompt: its token ids, where they are told, with its text, which may spell out special tokens.
        """
        self._token_bytes = token_bytes
        self._is_special = is_special
        self._prompt = prompt
        self._prompt_text = prompt_text
        self._tells_output = tells_output
        self._num_chars = 0
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._empty()

    def _empty(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def take(self, delta: Delta) -> None:
        if self._prompt:
            prompt, self._prompt = self._prompt, ()
            self._num_chars = -self._num_added_spaces(prompt)
            self._tell(prompt[0], None, None)  # nothing is before it that could make it probable
            if delta.prompt_logprobs is not None:
                self._tell_all(prompt[1:], delta.prompt_logprobs)
        if delta.logprobs is not None and self._tells_output:
            self._tell_all(delta.token_ids, delta.logprobs)

    def _tell_all(self, token_ids: Sequence[int], found: Logprobs) -> None:
        for token_id, logprob, top in _each(token_ids, found):
            told: dict[str, float] = {}
            for other, other_logprob in (*top, (token_id, logprob)):  # the token itself is always there
                told.setdefault(self._spelled(other), other_logprob)  # of two spelled alike the more probable
            self._tell(token_id, logprob, told)

    def _tell(self, token_id: int, logprob: float | None, top: dict[str, float] | None) -> None:
        spelled = self._token_bytes(token_id)
        self._tokens.append(self._spelled(token_id))
        self._logprobs.append(logprob)
        self._top.append(top)
        at = max(0, self._num_chars)
        self._offsets.append(at + self._breaks_off(spelled))
        if not self._is_special(token_id) or self._prompt_text.startswith(
            spelled.decode(errors="replace"), at
        ):
            self._num_chars += len(self._decoder.decode(spelled))  # characters that are whole now

    def _num_added_spaces(self, prompt: Sequence[int]) -> int:
        """Tokenizers whose words begin with their space put one before the first, which is in no text."""
        num_in_tokens = 0
        for token_id in prompt:
            spelled = b"" if self._is_special(token_id) else self._token_bytes(token_id)
            after = spelled.lstrip(b" ")
            num_in_tokens += len(spelled) - len(after)
            if after:
                break
        num_in_text = len(self._prompt_text) - len(self._prompt_text.lstrip(" "))
        return int(num_in_tokens == num_in_text + 1)

    def _breaks_off(self, spelled: bytes) -> bool:
        """Whether a character was begun and this does not go on with it: it is shown as U+FFFD then."""
        has_begun = bool(self._decoder.getstate()[0])
        return has_begun and spelled[:1] not in _CONTINUATIONS

    def _spelled(self, token_id: int) -> str:
        spelled = self._token_bytes(token_id)
        text = _decoded(spelled)
        return f"bytes:{_escaped(spelled)}" if text is None else text

    def due(self) -> CompletionLogprobs | None:
        if not self._tokens:
            return None
        told = CompletionLogprobs(
            text_offset=self._offsets,
            token_logprobs=self._logprobs,
            tokens=self._tokens,
            top_logprobs=self._top,
        )
        self._empty()
        return told


def _each(token_ids: Sequence[int], found: Logprobs) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """Each token, its log probability, and the most probable ones with theirs."""
    count = found.num_top
    for place, (token_id, logprob) in enumerate(zip(token_ids, found.chosen, strict=True)):
        part = slice(place * count, (place + 1) * count)
        yield token_id, logprob, list(zip(found.top_ids[part], found.top[part], strict=True))


def _decoded(spelled: bytes) -> str | None:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return None


def _escaped(spelled: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in spelled)
