"""The parts of a GBNF grammar that llguidance's converter (1.9.1) would write otherwise.

Knows characters and Lark's notation; knows neither GBNF's nor which parts are lexemes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from llguidance.gbnf_to_lark import ASTNode, LiteralNode, RegexNode, RepetitionNode

OTHER = 1 << 128
"""All that are not ASCII, in a set of characters: an integer, whose bit N is the character with number N."""
ANY = 2 * OTHER - 1


class Literal(LiteralNode):
    """A text: one lexeme, or each of its characters one."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.is_split = False

    def is_atomic(self) -> bool:
        return not self.is_split

    def __str__(self) -> str:
        return " ".join(map(quoted, self.value)) if self.is_split else quoted(self.value)


class CharClass(RegexNode):
    """One character of several."""

    def __init__(self, rx: str, chars: int) -> None:
        """chars: at least those that it may be."""
        super().__init__(rx)
        self.chars = chars


class Repetition(RepetitionNode):
    """May be repeated itself, and may be of nothing."""

    def is_atomic(self) -> bool:
        return False

    def __str__(self) -> str:
        return '""' if self.max_times == 0 else super().__str__()


def quoted(text: str) -> str:
    """A string in Lark's notation: JSON's, but for U+007F, which llguidance 1.9 reads only when escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def char_set(first: str, last: str | None = None) -> int:
    """One character, or all up to the last one."""
    low, high = (min(ord(char), 128) for char in (first, last or first))
    return (2 << high) - (1 << low)


def nodes_in(nodes: Iterable[ASTNode]) -> Iterator[ASTNode]:
    """They and all in them."""
    waiting: list[ASTNode] = list(nodes)
    for node in waiting:
        yield node
        waiting += node.children()
