"""What a reader makes of a model's text as it comes: what is said, what is thought, which tools are called.

Knows values; knows no format.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Protocol

from cache.messages import FinishReason


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call, as the model wrote it."""

    id: str
    name: str
    arguments: str  # JSON of an object, or the beginning of it where the answer was cut off


@dataclass(frozen=True, slots=True)
class Piece:
    """What a delta turned out to be."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    thought: str = ""
    more: str = ""  # of the arguments of the last call before these
    is_cut: bool = False  # it is the last, and the arguments of the last call go on

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.calls or self.thought or self.more)


class Reader(Protocol):
    """Reads one choice's text as it comes."""

    def read(self, text: str, ending: FinishReason | None) -> Piece:
        """What is certain by now.

        ending: why nothing follows, and then nothing is held back any more; None = more may come.
        """


class PlainReader:
    """Text is text."""

    def read(self, text: str, ending: FinishReason | None) -> Piece:
        return Piece(text)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def certain(text: str, *tags: str) -> int:
    """Characters of `text` before what may become a tag. Tags begin with the only `<` in them."""
    at = text.rfind("<")
    return at if at >= 0 and any(tag.startswith(text[at:]) for tag in tags) else len(text)
