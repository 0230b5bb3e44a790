"""From GBNF, llama.cpp's notation of grammars, to Lark's, in time that grows with the text.

llguidance's converter finds out which rules are terminals by going through all of them until nothing changes:
of a few thousand, each naming the next, that takes minutes. Here they are marked before, each once. It
refuses rules whose names are one in Lark, `start` beside `root` among them: here each gets a name of its own.
And it hands characters on as they are written, which Lark and its expressions read otherwise: here they are
read as llama.cpp reads them (its `src/llama-grammar.cpp`). Knows notations; knows no limits.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from llguidance.gbnf_to_lark import (
    ASTNode,
    GrammarParser,
    LiteralNode,
    Position,
    RegexNode,
    RuleNode,
    RuleRefNode,
)

_FIRST_RULE = re.compile(r"(?:[ \t\r\n]++|#[^\r\n]*+)*+[\w-]++[ \t]*+::=")  # possessive: each character once
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


def lark_of(text: str) -> str:
    """The same grammar. Raises whatever the converter trips over; its messages quote the text."""
    rules = _Parser().parse(text)
    for rule in rules.values():
        rule.alternatives = rule.alternatives.simplify()
    _mark_terminals(rules)
    for node in _nodes_in(rules.values()):
        if isinstance(node, RuleRefNode):
            node.target = rules[node.name]
        elif isinstance(node, RegexNode) and node.rx == ".":
            node.rx = _ANY_CHAR
    _rename(rules)
    return "\n".join(["%llguidance {}", "", *map(str, rules.values()), ""])


class _Parser(GrammarParser):
    """llguidance's (as of 1.9.1), but for what stands between quotes and brackets: characters, each read by
    llama.cpp's rules and written by Lark's."""

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
        return LiteralNode(quoted("".join(chars))[1:-1]), pos.advance()

    def _parse_char_class(self, pos: Position) -> tuple[ASTNode, Position]:
        pos = pos.advance()
        is_other = pos.current() == "^"
        pos, parts = pos.advance(is_other), list[str]()
        while pos.current() != "]":
            char, pos = self._parse_char(pos)
            written = _in_class(char)
            if pos.current() == "-" and pos.peek(2) != "-]":
                last, pos = self._parse_char(pos.advance())
                if last < char:
                    raise ValueError("a range of characters ends before it begins")
                written += f"-{_in_class(last)}"
            parts.append(written)
        if not parts:
            return LiteralNode(""), pos.advance()
        return RegexNode(f"[{'^' * is_other}{''.join(parts)}]"), pos.advance()


def quoted(text: str) -> str:
    """A string in Lark's notation: JSON's, but for U+007F, which llguidance 1.9 reads only when escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _in_class(char: str) -> str:
    """Nothing but the character, whatever it means in an expression: `&&` is one's intersection of sets."""
    return char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):X}}}"


def _mark_terminals(rules: Mapping[str, RuleNode]) -> None:
    """Those of texts and expressions alone, and of such rules; never `root`, where the text begins."""
    users: dict[str, list[RuleNode]] = defaultdict(list)
    missing: dict[str, int] = {}  # names in it that are not known to be terminals yet
    for rule in rules.values():
        names = {node.name for node in _nodes_in([rule]) if isinstance(node, RuleRefNode)}
        missing[rule.name] = len(names)
        for name in names:
            users[name].append(rule)
    terminals = [rule for rule in rules.values() if not missing[rule.name] and rule.name != "root"]
    for terminal in terminals:
        terminal.rule_is_terminal = True
        for user in users[terminal.name]:
            missing[user.name] -= 1
            if not missing[user.name] and user.name != "root":
                terminals.append(user)


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


def _nodes_in(rules: Iterable[RuleNode]) -> Iterator[ASTNode]:
    waiting: list[ASTNode] = list(rules)
    for node in waiting:
        yield node
        waiting += node.children()
