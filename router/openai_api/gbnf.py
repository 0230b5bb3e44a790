"""From GBNF, llama.cpp's notation of grammars, to Lark's, in time that grows with the text.

llguidance's converter makes lexemes of rules wherever it can; `gbnf_lexemes.py` says which may be. It refuses
rules whose names are one in Lark, `start` beside `root` among them: here each gets a name of its own.
And it hands characters on as they are written, which Lark and its expressions read otherwise: here they are
read as llama.cpp reads them (its `src/llama-grammar.cpp`). Knows notations; knows no limits.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping

from llguidance.gbnf_to_lark import (
    ASTNode,
    GrammarParser,
    Position,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
)

from router.openai_api.gbnf_lexemes import mark_lexemes
from router.openai_api.gbnf_nodes import ANY, OTHER, CharClass, Literal, Repetition, char_set, nodes_in

FROM_GBNF = "// from GBNF"
"""The first line of what is written here: places in it are none of the client's."""

_FIRST_RULE = re.compile(r"(?:[ \t\r\n]++|#[^\r\n]*+)*+[\w-]++[ \t]*+::=")  # possessive: each character once
_PLAIN_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
_HUMP = re.compile(r"([a-z])([A-Z])")
_UNNAMEABLE = re.compile(r"[^A-Za-z0-9_]")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}  # behind the letter of an escape: the number of a character
_ESCAPED = {"t": "\t", "r": "\r", "n": "\n", **{char: char for char in '\\"[]-'}}
_ANY_CHAR = r"(?s:.)"  # line ends included


def is_gbnf(text: str) -> bool:
    """Whether it begins with a rule as GBNF writes them, `name ::= ...`; nothing of Lark's is written so.

    What rules are called says nothing: `start` is a name like any other here, and Lark has signs before and
    after it (`?start:`, `start[max_tokens=3]:`).
    """
    return _FIRST_RULE.match(text) is not None


class UndefinedRule(Exception):
    """A rule that is named, as `root` always is, and not there. Its message quotes a plain name only."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"has no rule '{name}'" if _PLAIN_NAME.fullmatch(name) else "lacks a rule that it names"
        )


def lark_of(text: str) -> str:
    """The same grammar.

    Raises UndefinedRule, and whatever the converter trips over; its messages quote the text.
    """
    rules = _Parser().parse(text)
    if "root" not in rules:
        raise UndefinedRule("root")
    for rule in rules.values():
        rule.alternatives = rule.alternatives.simplify()
    for node in nodes_in(rules.values()):
        if isinstance(node, RuleRefNode) and node.name not in rules:
            raise UndefinedRule(node.name)
    mark_lexemes(rules)
    for node in nodes_in(rules.values()):
        if isinstance(node, RuleRefNode):
            node.target = rules[node.name]
    _rename(rules)
    return "\n".join([FROM_GBNF, "%llguidance {}", "", *map(str, rules.values()), ""])


class _Parser(GrammarParser):
    """llguidance's (as of 1.9.1), but for what stands between quotes and brackets: characters, each read by
    llama.cpp's rules and written by Lark's. And it hands on what there are nodes of ours for."""

    def _parse_char(self, pos: Position) -> tuple[str, Position]:
        """One, and where the next begins. Raises ValueError where there is none."""
        char = pos.current()
        if char != "\\":
            if not char:
                raise ValueError("the text ends")
            return char, pos.advance()
        escape = pos.peek(2)[1:]
        if (num_digits := _HEX_DIGITS.get(escape)) is None:
            return _ESCAPED[escape], pos.advance(2)
        digits = pos.peek(2 + num_digits)[2:]
        if len(digits) < num_digits or not set(digits) <= set(string.hexdigits):
            raise ValueError("a character's number has too few digits")
        read = chr(int(digits, 16))
        if "\ud800" <= read <= "\udfff":
            raise ValueError("half a surrogate pair is no character")
        return read, pos.advance(2 + num_digits)

    def _parse_literal(self, pos: Position) -> tuple[ASTNode, Position]:
        pos, chars = pos.advance(), list[str]()
        while pos.current() != '"':
            char, pos = self._parse_char(pos)
            chars.append(char)
        return Literal("".join(chars)), pos.advance()

    def _parse_char_class(self, pos: Position) -> tuple[ASTNode, Position]:
        pos = pos.advance()
        is_other = pos.current() == "^"
        pos, parts, chars = pos.advance(is_other), list[str](), 0
        while pos.current() != "]":
            first, pos = self._parse_char(pos)
            last, written = first, _in_class(first)
            if pos.current() == "-" and pos.peek(2) != "-]":
                last, pos = self._parse_char(pos.advance())
                if last < first:
                    raise ValueError("a range of characters ends before it begins")
                written += f"-{_in_class(last)}"
            parts.append(written)
            chars |= char_set(first, last)
        if not parts:
            return Literal(""), pos.advance()
        if is_other:
            chars = ANY & ~chars | OTHER
        return CharClass(f"[{'^' * is_other}{''.join(parts)}]", chars), pos.advance()

    def _parse_repetition(self, pos: Position, nodes: list[ASTNode]) -> Position:
        """Called behind each node that is read, the last of `nodes` then: a sign may follow it."""
        if nodes and type(nodes[-1]) is RegexNode:  # the sign for any
            nodes[-1] = CharClass(_ANY_CHAR, ANY)
        pos = super()._parse_repetition(pos, nodes)
        if nodes and type(node := nodes[-1]) is RepetitionNode:
            nodes[-1] = Repetition(node.node, node.min_times, node.max_times)
        return pos


def _in_class(char: str) -> str:
    """Nothing but the character, whatever it means in an expression: `&&` is one's intersection of sets."""
    return char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):X}}}"


def _rename(rules: Mapping[str, RuleNode]) -> None:
    """As Lark names rules, in small letters, and terminals, in capitals; `start` is where the text begins."""
    rules["root"].name = "start"
    taken, num_alike = {"start"}, Counter[str]()
    for name, rule in rules.items():
        if name == "root":
            continue
        written = _UNNAMEABLE.sub("_", _HUMP.sub(r"\1_\2", name))
        if not written[0].isalpha():
            written = f"r{written}"
        free = base = written.upper() if rule.rule_is_terminal else written.lower()
        while free in taken:
            num_alike[base] += 1
            free = f"{base}_{num_alike[base]}"
        taken.add(free)
        rule.name = free
