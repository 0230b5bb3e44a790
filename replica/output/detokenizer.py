"""From sampled tokens to text that may be shown, and to the reason to stop.

Incremental: text once given out is never taken back, and no half character is ever given out.
Knows token ids and text; knows neither scheduling nor sampling nor where the text goes.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from typing import Protocol

from cache.messages import FinishReason, SamplingParams

REPLACEMENT = "\ufffd"

# A character cut short leaves at most three bytes behind: one U+FFFD for them together, or one for each
# where SentencePiece decodes. So no more than this many at the end can still change.
MAX_UNSETTLED = 3

# How many tokens may pile up without a clean cut before one is searched for the expensive way.
LONG_WINDOW_TOKENS = 8

# The prompt's last tokens among which one is looked for that can be seen: nearly always the very last.
MAX_CONTEXT_TOKENS = 8

# How many tokens of an earlier attempt are decoded together: hardly dearer than one, and few enough to be
# pushed one by one where an end may lie among them.
CHUNK_TOKENS = 64


class TokenDecoder(Protocol):
    """A tokenizer's way back. Pure; called from the engine thread only."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens together, special tokens left out, nothing cleaned up.

        A character that is whole stays what it is, whatever tokens follow.
        """


class NoText:
    """Decodes everything to nothing: for engines whose text nobody reads."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


class Detokenizer:
    """One request's output: push tokens, take text.

        output text:  [0, sent) the client has it   [.., held) may be shown   [held, end) may become a stop

    A continued stream is pushed from its first output token on (`push_all`), exactly as if it had never
    been interrupted; `sent_chars` then says how much of the text is not to be given out again.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        sampling: SamplingParams,
        eos_token_ids: frozenset[int],
        *,
        max_tokens: int,
        sent_chars: int = 0,
        prompt: Sequence[int] = (),
    ) -> None:
        """max_tokens: of the whole output, older attempts' tokens included.

        prompt: what the output goes on from, or its end; the text is what is added to that one's.
        """
        self._window = _Window(decoder, prompt)
        self._stops = sampling.stop
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._stop_token_ids |= eos_token_ids
        self._min_tokens = sampling.min_tokens
        self._max_tokens = max_tokens
        self._skip_chars = sent_chars
        self._num_tokens = 0
        self._undecoded = array("i")
        self._held = ""  # settled, but could still turn out to be the start of a stop string
        self._num_early = 0  # characters of `_held` that were there before `min_tokens`: no stop ends in them
        self._ready = ""  # may be shown, not taken yet
        self._finish_reason: FinishReason | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._finish_reason

    def push(self, token_id: int) -> FinishReason | None:
        """Take the next output token; the reason when it is the last one. Nothing may follow that."""
        assert self._finish_reason is None, "a token after the last one"
        self._num_tokens += 1
        may_stop = self._num_tokens >= self._min_tokens
        if may_stop and token_id in self._stop_token_ids:
            self._finish(FinishReason.STOP, may_stop)
            return self._finish_reason
        self._undecoded.append(token_id)
        if self._stops:  # else decoding can wait until somebody wants the text
            self._decode(may_stop)
        if self._finish_reason is None and self._num_tokens >= self._max_tokens:
            self._finish(FinishReason.LENGTH, may_stop)
        return self._finish_reason

    def push_all(self, token_ids: Sequence[int]) -> FinishReason | None:
        """`push` one after the other until one is the last one; the reason then. Nothing may follow that.

        Where there are stop strings each token costs a decode and a search; here those among which nothing
        can end cost one together.
        """
        for begin in range(0, len(token_ids), CHUNK_TOKENS):
            chunk = token_ids[begin : begin + CHUNK_TOKENS]
            if self._stops and self._push_inner(chunk):
                continue
            for token_id in chunk:
                if self.push(token_id) is not None:
                    return self._finish_reason
        return self._finish_reason

    def _push_inner(self, token_ids: Sequence[int]) -> bool:
        """`push` them all at once, if none of them is the last one; else, or if in doubt, none of them."""
        num_tokens = self._num_tokens + len(token_ids)
        is_early, is_late = num_tokens < self._min_tokens, self._num_tokens + 1 >= self._min_tokens
        if num_tokens >= self._max_tokens or not (is_early or is_late):
            return False
        if is_late and not self._stop_token_ids.isdisjoint(token_ids):
            return False
        window = self._window.copy()
        text = window.extend(token_ids)
        if is_late and any(stop in self._held + text for stop in self._stops):
            return False
        self._window, self._num_tokens = window, num_tokens
        self._feed(text, may_stop=is_late)
        return True

    def end(self) -> FinishReason:
        """The text is complete, for a reason that is not to be seen in it. The reason then."""
        if self._finish_reason is None:
            self._finish(FinishReason.STOP, may_stop=True)
        elif self._finish_reason is FinishReason.LENGTH:  # complete with the very last token
            self._finish_reason = FinishReason.STOP
        assert self._finish_reason is not None
        return self._finish_reason

    def take(self) -> str:
        """Text that may be shown and was not taken before. Never ends in half a character."""
        if self._undecoded:
            self._decode(may_stop=False)  # reached without stop strings only
        text, self._ready = self._ready, ""
        return text

    def _decode(self, may_stop: bool) -> None:
        text = self._window.extend(self._undecoded)
        del self._undecoded[:]
        self._feed(text, may_stop)

    def _feed(self, text: str, may_stop: bool) -> None:
        self._held += text
        if not may_stop:
            self._num_early = len(self._held)
        elif (stop_at := _first_match(self._held, self._stops, self._num_early)) is not None:
            self._release(stop_at)
            self._held = ""
            self._finish_reason = FinishReason.STOP
            return
        self._release(len(self._held) - _longest_stop_start(self._held, self._stops))

    def _finish(self, reason: FinishReason, may_stop: bool) -> None:
        """No token follows: settle what was waiting for one."""
        if self._undecoded:
            self._decode(may_stop=False)
        self._feed(self._window.flush(), may_stop)
        if self._finish_reason is None:
            self._release(len(self._held))
            self._finish_reason = reason

    def _release(self, num_chars: int) -> None:
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        self._num_early = max(0, self._num_early - num_chars)
        skipped = min(self._skip_chars, len(text))
        self._skip_chars -= skipped
        self._ready += text[skipped:]


class _Window:
    """Text of a growing token stream, decoded a few tokens at a time.

        tokens[:prefix] settled   [prefix, read) settled, decoded again as context   [read, end) new

    A decoder's text for a token depends on its neighbours: bytes of one character may lie in several
    tokens, and some decoders drop the first token's leading space. So new tokens are decoded behind
    a little context, and the context is cut only where a character ends.
    """

    def __init__(self, decoder: TokenDecoder, prompt: Sequence[int]) -> None:
        self._decoder = decoder
        # Context and new tokens only, never the whole output. The first context is the prompt's end: a text's
        # first token would lose its space, and "Once upon" be followed by "a time".
        self._tokens = _visible_end(decoder, prompt)
        self._read = len(self._tokens)
        self._context_chars = len(decoder.decode(self._tokens)) if self._tokens else 0  # of [:read)
        self._shown = self._context_chars  # characters of decode(tokens) already returned, context included

    def copy(self) -> _Window:
        copied = copy.copy(self)
        copied._tokens = self._tokens[:]
        return copied

    def extend(self, token_ids: Sequence[int]) -> str:
        """Take tokens in; the settled text they add, perhaps none."""
        self._tokens.extend(token_ids)
        text = self._decoder.decode(self._tokens)
        settled = len(text) - _unsettled(text)
        fresh = text[self._shown : settled]
        self._shown = max(self._shown, settled)
        self._advance(text)
        return fresh

    def flush(self) -> str:
        """What is left when no more tokens come: half characters as the decoder shows them."""
        text = self._decoder.decode(self._tokens)
        fresh = text[self._shown :]
        self._shown = len(text)
        return fresh

    def _advance(self, text: str) -> None:
        """Cut the context where that provably changes nothing that comes later."""
        has_grown = len(text) > self._context_chars
        if has_grown and not text.endswith(REPLACEMENT):
            self._cut(len(self._tokens), text)
        elif len(self._tokens) - self._read > LONG_WINDOW_TOKENS:
            self._drop_invisible()
            if len(self._tokens) - self._read > LONG_WINDOW_TOKENS:
                self._cut_inside(text)

    def _drop_invisible(self) -> None:
        """Leave of the new tokens those that are seen: special ones change no text, and may come for ever."""
        # Twice: the first space of a text is not seen behind some decoders, and the second is.
        new = [each for each in self._tokens[self._read :] if self._decoder.decode([each, each])]
        self._tokens[self._read :] = array("i", new)

    def _cut(self, at: int, text: str) -> None:
        """Drop the context; tokens [read, at) become the new one. `text`: of the whole window."""
        unshown = len(text) - self._shown
        del self._tokens[: self._read]
        self._read = at - self._read
        window_text = self._decoder.decode(self._tokens)
        self._shown = len(window_text) - unshown
        self._context_chars = len(
            window_text
            if self._read == len(self._tokens)
            else self._decoder.decode(self._tokens[: self._read])
        )

    def _cut_inside(self, text: str) -> None:
        """Invalid bytes never end a character cleanly: find a place where both sides decode alike.

        Were a character torn at `at`, its first half would show at least one U+FFFD and its second half
        another, so the two sides together would be longer than the whole: equality proves a border. Not so
        where each byte of half a character shows one. But nothing is dropped at `at` before the next cut, and
        that comes where a character ends, or after more tokens that are seen than a character has bytes.
        """
        for at in range(len(self._tokens) - 1, self._read, -1):
            right = self._decoder.decode(self._tokens[at:])
            if right and self._decoder.decode(self._tokens[:at]) + right == text:
                self._cut(at, text)
                return


def _visible_end(decoder: TokenDecoder, prompt: Sequence[int]) -> array[int]:
    """The fewest last tokens that decode to some text and end with a character; none if there are none."""
    for count in range(1, min(MAX_CONTEXT_TOKENS, len(prompt)) + 1):
        end = array("i", prompt[-count:])
        if (text := decoder.decode(end)) and not text.endswith(REPLACEMENT):
            return end
    return array("i")


def _unsettled(text: str) -> int:
    """Characters at the end that later tokens may still change."""
    count = 0
    while count < min(MAX_UNSETTLED, len(text)) and text[-1 - count] == REPLACEMENT:
        count += 1
    return count


def _first_match(text: str, stops: Sequence[str], num_early: int) -> int | None:
    """Where the earliest stop string begins, of those that end behind the first `num_early` characters."""
    firsts = (text.find(stop, max(0, num_early - len(stop) + 1)) for stop in stops)
    return min((at for at in firsts if at >= 0), default=None)


def _longest_stop_start(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` that are the beginning, not the whole, of some stop string."""
    return max((_overlap(text, stop) for stop in stops), default=0)


def _overlap(text: str, stop: str) -> int:
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
