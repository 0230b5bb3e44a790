"""From GBNF, llama.cpp's notation of grammars, to Lark's, in time that grows with the text.

llguidance's converter finds out which rules are terminals by going through all of them until nothing changes:
of a few thousand, each naming the next, that takes minutes, and the event loop waits. Here they are marked
before, each once. It refuses rules whose names are one in Lark, `start` beside `root` among them: here each
gets a name of its own. Knows notations; knows no limits.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from llguidance.gbnf_to_lark import ASTNode, GrammarParser, RuleNode, RuleRefNode

_FIRST_RULE = re.compile(r"(?:[ \t\r\n]++|#[^\r\n]*+)*+[\w-]++[ \t]*+::=")  # possessive: each character once
_HUMP = re.compile(r"([a-z])([A-Z])")
_UNNAMEABLE = re.compile(r"[^A-Za-z0-9_]")


def is_gbnf(text: str) -> bool:
    """Whether it begins with a rule as GBNF writes them, `name ::= ...`; nothing of Lark's is written so.

    What rules are called says nothing: `start` is a name like any other here, and Lark has signs before and
    after it (`?start:`, `start[max_tokens=3]:`).
    """
    return _FIRST_RULE.match(text) is not None


def lark_of(text: str) -> str:
    """The same grammar. Raises whatever the converter trips over; its messages quote the text."""
    rules = GrammarParser().parse(text)
    for rule in rules.values():
        rule.alternatives = rule.alternatives.simplify()
    _mark_terminals(rules)
    for node in _nodes_in(rules.values()):
        if isinstance(node, RuleRefNode):
            node.target = rules[node.name]
    _rename(rules)
    return "\n".join(["%llguidance {}", "", *map(str, rules.values()), ""])


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
