"""Log probabilities as the two endpoints tell them, in JSON, kept until the next chunk takes them along.

A token is told as its text. One that is no whole character by itself (a byte of an emoji, say) is told by its
bytes, escaped, as the API does: `\\xf0\\x9f` in chats, `bytes:\\xf0\\x9f` in completions. Chats also have the
bytes themselves: those of an answer's tokens, one after another, are its text and what is left out of it,
special tokens and what a stop string cuts off.

A long prompt has hundreds of thousands of them. So the bytes are written here, token by token, and are those
of `ChatLogprobs` and `CompletionLogprobs` in `responses.py`: models of chats' take ten times as long, and all
models are checked and serialized in one piece, in which no other thread runs.

Knows token ids, their bytes and packed numbers; knows neither deltas' text nor how chunks are sent.
"""

from __future__ import annotations

import itertools
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import add
from typing import Protocol

from pydantic_core import to_json

from cache.messages import Delta, Logprobs

_SLICE = 256  # tokens whose numbers are written in one call: under a millisecond, with twenty each
TokenBytes = Callable[[int], bytes]
_CONTINUATIONS = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))  # of UTF-8: they begin no character


class LogprobRecord(Protocol):
    """One choice's. Each token goes in once and comes out once."""

    def take(self, delta: Delta) -> None:
        """Take in what a delta tells."""

    def due(self) -> bytes | None:
        """What was taken in since the last call, as JSON; None if nothing was. Changes state."""


class NoLogprobs:
    """Of a choice whose request did not ask."""

    def take(self, delta: Delta) -> None:
        pass

    def due(self) -> None:
        return None


class _Written(dict[int, bytes]):
    """What stands for a token, by its id: most tokens of a long prompt come many times."""

    def __init__(self, write: Callable[[int], bytes]) -> None:
        super().__init__()
        self._write = write

    def __missing__(self, token_id: int) -> bytes:
        written = self[token_id] = self._write(token_id)
        return written


class ChatLogprobRecord:
    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._begun = _Written(self._beginning)
        self._entries: list[bytes] = []

    def take(self, delta: Delta) -> None:
        if delta.logprobs is None:
            return
        begun = self._begun
        for token_id, logprob, top_ids, top in _each(delta.token_ids, delta.logprobs):
            others = b"},".join(map(add, map(begun.__getitem__, top_ids), top)) + (b"}" if top else b"")
            self._entries.append(b'%b%b,"top_logprobs":[%b]}' % (begun[token_id], logprob, others))

    def _beginning(self, token_id: int) -> bytes:
        """A token's object up to its log probability."""
        spelled = self._token_bytes(token_id)
        text = _decoded(spelled)
        shown = _escaped(spelled) if text is None else text
        return b'{"token":%b,"bytes":%b,"logprob":' % (to_json(shown), to_json(list(spelled)))

    def due(self) -> bytes | None:
        entries, self._entries = self._entries, []
        return b'{"content":[%b],"refusal":null}' % b",".join(entries) if entries else None


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
        self._quoted = _Written(lambda token_id: to_json(self._spelled(token_id)))
        self._named = _Written(lambda token_id: self._quoted[token_id] + b":")
        self._is_special = is_special
        self._prompt = prompt
        self._prompt_text = prompt_text
        self._tells_output = tells_output
        self._num_chars = 0
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._empty()

    def _empty(self) -> None:
        self._tokens: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._top: list[bytes] = []
        self._offsets: list[bytes] = []

    def take(self, delta: Delta) -> None:
        if self._prompt:
            prompt, self._prompt = self._prompt, ()
            self._num_chars = -self._num_added_spaces(prompt)
            self._tell(prompt[0], b"null", b"null")  # nothing is before it that could make it probable
            if delta.prompt_logprobs is not None:
                self._tell_all(prompt[1:], delta.prompt_logprobs)
        if delta.logprobs is not None and self._tells_output:
            self._tell_all(delta.token_ids, delta.logprobs)

    def _tell_all(self, token_ids: Sequence[int], found: Logprobs) -> None:
        named = self._named
        for token_id, logprob, top_ids, top in _each(token_ids, found):
            names, own = list(map(named.__getitem__, top_ids)), named[token_id]
            if own not in names:  # the token itself is always there
                names.append(own)
                top.append(logprob)
            members: Iterable[bytes] = map(add, names, top)
            if len(set(names)) < len(names):  # of two spelled alike the more probable one, which comes first
                members = itertools.compress(members, _are_first(names))
            self._tell(token_id, logprob, b"{%b}" % b",".join(members))

    def _tell(self, token_id: int, logprob: bytes, top: bytes) -> None:
        spelled = self._token_bytes(token_id)
        self._tokens.append(self._quoted[token_id])
        self._logprobs.append(logprob)
        self._top.append(top)
        at = max(0, self._num_chars)
        self._offsets.append(b"%d" % (at + self._breaks_off(spelled)))
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

    def due(self) -> bytes | None:
        if not self._tokens:
            return None
        lists = (self._offsets, self._logprobs, self._tokens, self._top)
        self._empty()
        return b'{"text_offset":[%b],"token_logprobs":[%b],"tokens":[%b],"top_logprobs":[%b]}' % tuple(
            b",".join(each) for each in lists
        )


def num_told(delta: Delta) -> int:
    """Log probabilities that a delta tells. A microsecond or less to write each."""
    found = [each for each in (delta.logprobs, delta.prompt_logprobs) if each is not None]
    return sum([len(each.chosen) + len(each.top) for each in found])


def _each(
    token_ids: Sequence[int], found: Logprobs
) -> Iterator[tuple[int, bytes, Sequence[int], list[bytes]]]:
    """Each token, its log probability, and the most probable ones, with theirs in a list of its own."""
    count = found.num_top
    for begin in range(0, max(len(token_ids), len(found)), _SLICE):
        end = begin + _SLICE
        top_ids, top = (
            found.top_ids[begin * count : end * count],
            _numbers(found.top[begin * count : end * count]),
        )
        chosen = _numbers(found.chosen[begin:end])
        for place, (token_id, logprob) in enumerate(zip(token_ids[begin:end], chosen, strict=True)):
            part = slice(place * count, (place + 1) * count)
            yield token_id, logprob, top_ids[part], top[part]


def _numbers(values: Sequence[float]) -> list[bytes]:
    """Each as JSON."""
    return to_json(list(values), inf_nan_mode="null")[1:-1].split(b",") if values else []


def _are_first(names: Sequence[bytes]) -> list[bool]:
    """Whether each is the first of its kind."""
    return [name not in names[:place] for place, name in enumerate(names)]


def _decoded(spelled: bytes) -> str | None:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return None


def _escaped(spelled: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in spelled)
