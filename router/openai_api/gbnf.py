"""From GBNF, llama.cpp's notation of grammars, to Lark's, in time that grows with the text.

llguidance's converter finds out which rules are terminals by going through all of them until nothing changes:
of a few thousand, each naming the next, that takes minutes, and the event loop waits. Here they are marked
before, each once. Knows notations; knows no limits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from llguidance.gbnf_to_lark import ASTNode, GrammarParser, RuleNode, RuleRefNode, resolve


def lark_of(text: str) -> str:
    """The same grammar. Raises whatever the converter trips over; its messages quote the text."""
    rules = GrammarParser().parse(text)
    _mark_terminals(rules)
    resolve(rules)
    written = [str(rule) for rule in sorted(rules.values(), key=lambda rule: rule.order)]
    return "\n".join(["%llguidance {}", "", *written, ""])


def _mark_terminals(rules: Mapping[str, RuleNode]) -> None:
    """Those of texts and expressions alone, and of such rules; never `root`, where the text begins."""
    users: dict[str, list[RuleNode]] = defaultdict(list)
    missing: dict[str, int] = {}  # names in it that are not known to be terminals yet
    for rule in rules.values():
        names = set(_names_in(rule))
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


def _names_in(rule: RuleNode) -> Iterator[str]:
    waiting: list[ASTNode] = [rule]
    for node in waiting:
        if isinstance(node, RuleRefNode):
            yield node.name
        waiting += node.children()
