"""Thoughts, found in what a model writes: from text deltas to what it thinks first, and to its answer.

The format is that of DeepSeek R1, Qwen3 and most models that think: `<think>thought</think>answer`, where the
prompt may have opened the thought already. Only what comes first is a thought; later on the tag is text.
White space around both is neither's. Knows text; knows neither tokens nor HTTP.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from cache.messages import FinishReason
from router.openai_api.pieces import Piece, Reader, certain

OPEN = "<think>"
CLOSE = "</think>"
THOUGHT_TAGS = (OPEN, CLOSE)


def thinks(template: str | None) -> bool:
    """Whether a chat template is of a model that thinks: it has a tag of thoughts in it."""
    return template is not None and any(tag in template for tag in THOUGHT_TAGS)


def ends_in_thought(prompt_end: str) -> bool:
    """Whether a prompt opens a thought, by its last characters: the model then writes no tag itself."""
    return prompt_end.rstrip().endswith(OPEN)


class _Place(Enum):
    BEFORE = "a thought or an answer may begin"
    THOUGHT = "in the thought"
    BETWEEN = "behind the thought"
    ANSWER = "in the answer"


class ThoughtReader:
    """Parts the thought from the answer, which another reader reads: in a thought nothing else is looked for.

    [undecided)   or   thought ... [undecided)   or   the answer, none of it kept here
    """

    def __init__(self, answer: Reader, *, is_open: bool = False) -> None:
        """is_open: the prompt has opened the thought."""
        self._answer = answer
        self._is_open = is_open
        self._place = _Place.BEFORE
        self._buffer = ""
        self._has_begun = False  # the thought's white space is over

    def read(self, text: str, ending: FinishReason | None) -> Piece:
        """See `Reader`."""
        if self._place is _Place.ANSWER:
            return self._answer.read(text, ending)
        is_last = ending is not None
        self._buffer += text
        if self._place is _Place.BEFORE:
            self._begin(is_last)
        thought = self._think(is_last) if self._place is _Place.THOUGHT else ""
        if self._place is _Place.BETWEEN:
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._place = _Place.ANSWER
        rest = ""
        if self._place is _Place.ANSWER:
            rest, self._buffer = self._buffer, ""
        piece = self._answer.read(rest, ending)
        return replace(piece, thought=thought)

    def _begin(self, is_last: bool) -> None:
        start = self._buffer.lstrip()
        if OPEN.startswith(start) and not is_last:
            return
        if start.startswith(OPEN):  # models also write it where the prompt has
            self._buffer = start.removeprefix(OPEN)
            self._place = _Place.THOUGHT
        else:
            self._place = _Place.THOUGHT if self._is_open else _Place.ANSWER

    def _think(self, is_last: bool) -> str:
        if not self._has_begun:
            self._buffer = self._buffer.lstrip()
        end = self._buffer.find(CLOSE)
        if end >= 0:
            thought, self._buffer = self._buffer[:end].rstrip(), self._buffer[end + len(CLOSE) :]
            self._place = _Place.BETWEEN
        else:
            settled = len(self._buffer)
            if not is_last:
                settled = len(self._buffer[: certain(self._buffer, CLOSE)].rstrip())
            thought, self._buffer = self._buffer[:settled], self._buffer[settled:]
        self._has_begun |= bool(thought)
        return thought
