"""GBNF is followed as llama.cpp follows it: a text passes if there is any way to read it by the rules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from cache.structure import Structure, StructureKind
from router.openai_api.gbnf import lark_of

_CHARS = "abé"
_LITERALS = ["", "a", "ab", "aba", "abé", "b", "ba", "é", "éa"]  # which begin alike
_TEXTS = ["".join(chars) for size in range(4) for chars in itertools.product(_CHARS, repeat=size)]
_TEXTS += ["abab", "aabb", "aéaé", "babab", "ééééé"]


class Node:
    """Part of a rule. Where it ends in a text, tried in all ways: that is the law."""

    def ends(self, begin: int, reading: Reading) -> set[int]:
        raise NotImplementedError


class Reading:
    """A text by rules: each part at each place is tried once."""

    def __init__(self, text: str, rules: Sequence[Node]) -> None:
        self.text = text
        self.rules = rules
        self._found: dict[tuple[int, int], set[int]] = {}

    def ends(self, node: Node, begin: int) -> set[int]:
        key = id(node), begin
        if key not in self._found:
            self._found[key] = node.ends(begin, self)
        return self._found[key]


@dataclass(frozen=True)
class Text(Node):
    text: str

    def __str__(self) -> str:
        return f'"{self.text}"'

    def ends(self, begin: int, reading: Reading) -> set[int]:
        return {begin + len(self.text)} if reading.text.startswith(self.text, begin) else set()


@dataclass(frozen=True)
class Class(Node):
    chars: str
    is_other: bool

    def __str__(self) -> str:
        return f"[{'^' * self.is_other}{self.chars}]" if self.chars else "."

    def ends(self, begin: int, reading: Reading) -> set[int]:
        is_in = not self.chars or (reading.text[begin : begin + 1] in self.chars) is not self.is_other
        return {begin + 1} if begin < len(reading.text) and is_in else set()


@dataclass(frozen=True)
class Rule(Node):
    index: int

    def __str__(self) -> str:
        return f"r{self.index}" if self.index else "root"

    def ends(self, begin: int, reading: Reading) -> set[int]:
        return reading.ends(reading.rules[self.index], begin)


@dataclass(frozen=True)
class Row(Node):
    nodes: tuple[Node, ...]

    def __str__(self) -> str:
        return f"({' '.join(map(str, self.nodes))})"

    def ends(self, begin: int, reading: Reading) -> set[int]:
        places = {begin}
        for node in self.nodes:
            places = {end for place in places for end in reading.ends(node, place)}
        return places


@dataclass(frozen=True)
class Choice(Node):
    nodes: tuple[Node, ...]

    def __str__(self) -> str:
        return f"({' | '.join(map(str, self.nodes))})"

    def ends(self, begin: int, reading: Reading) -> set[int]:
        return {end for node in self.nodes for end in reading.ends(node, begin)}


@dataclass(frozen=True)
class Repeated(Node):
    node: Node
    at_least: int
    sign: str

    @property
    def at_most(self) -> int:
        return {"*": 9, "+": 9, "?": 1, "{0}": 0, "{2}": 2, "{1,}": 9, "{0,2}": 2}[self.sign]

    def __str__(self) -> str:
        node = f"({self.node})" if isinstance(self.node, Repeated) else self.node
        return f"{node}{self.sign}"

    def ends(self, begin: int, reading: Reading) -> set[int]:
        places, found = {begin}, set[int]()
        for number in range(self.at_most + 1):
            if number >= self.at_least:
                found |= places
            places = {end for place in places for end in reading.ends(self.node, place)}
        return found


_SIGNS = [(0, "*"), (1, "+"), (0, "?"), (0, "{0}"), (2, "{2}"), (1, "{1,}"), (0, "{0,2}")]
_CLASSES = st.builds(Class, st.sampled_from(["a", "b", "é", "ab", "bé", ""]), st.booleans())


def _nodes(num_rules: int, index: int) -> st.SearchStrategy[Node]:
    """Of one rule: it names later ones, and any behind a character, so that none begins with itself."""
    leaves = [st.builds(Text, st.sampled_from(_LITERALS)), _CLASSES]
    leaves.append(
        st.builds(lambda char, number: Row((char, Rule(number))), _CLASSES, st.integers(0, num_rules - 1))
    )
    if index + 1 < num_rules:
        leaves.append(st.builds(Rule, st.integers(index + 1, num_rules - 1)))
    return st.recursive(
        st.one_of(leaves),
        lambda inner: st.one_of(
            st.builds(lambda nodes: Row(tuple(nodes)), st.lists(inner, min_size=1, max_size=3)),
            st.builds(lambda nodes: Choice(tuple(nodes)), st.lists(inner, min_size=1, max_size=3)),
            st.builds(lambda node, sign: Repeated(node, *sign), inner, st.sampled_from(_SIGNS)),
        ),
        max_leaves=5,
    )


_RULES = st.integers(1, 3).flatmap(
    lambda number: st.tuples(*(_nodes(number, index) for index in range(number)))
)


def _star(node: Node) -> Node:
    return Repeated(node, 0, "*")


@given(_RULES)
@example((Row((Rule(1), Text("a"))), _star(Class("ab", is_other=False))))
@example((Choice((Text("ab"), Row((Text("a"), Text("ba"))))),))
@example((Choice((Row((Text("aba"), Text("b"))), Row((Text("ab"), Text("a"), Text("a"))))),))
@example((Row((Rule(1), Class("é", is_other=False))), Row((Text("a"), Repeated(Text("éé"), 0, "?")))))
@example((Row((Repeated(_star(Text("a")), 0, "?"), Text("b"))),))
def test_a_text_passes_that_the_rules_can_read(rules: tuple[Node, ...]) -> None:
    written = "\n".join(f"{Rule(index)} ::= {node}" for index, node in enumerate(rules))
    grammar = Structure(StructureKind.GRAMMAR, lark_of(written)).grammar()
    begun = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert not begun.get_error()
    for text in _TEXTS:
        matcher, taken = begun.deep_copy(), list(text.encode())
        passes = matcher.try_consume_tokens(taken) == len(taken) and matcher.is_accepting()
        assert passes is (len(text) in Reading(text, rules).ends(rules[0], 0)), text
