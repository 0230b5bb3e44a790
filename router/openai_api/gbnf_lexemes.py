"""Which parts of a GBNF grammar are lexemes: rules and texts that llguidance's lexer takes in one piece.

llama.cpp follows a grammar character by character. A lexer takes as much as the longest of those lexemes goes
on that may come, and gives nothing back: with `[a-z]*` as one, and "a" behind it, the "a" is never found.
Where each character is a lexeme the grammar is followed as it is, but a mask over 137,000 tokens takes 4 ms
for 0.07. So a part is a lexeme unless it can take what may follow one, itself or another that began alike.
Where that is not known for sure, or only after many steps, it is none.

Knows nodes; knows no notation.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    RuleNode,
    RuleRefNode,
    SequenceNode,
)

from router.openai_api.gbnf_nodes import ANY, OTHER, CharClass, Literal, Repetition, char_set, nodes_in

MAX_STEPS = 200_000  # some 0.3 s; a thousand words take 70,000

_EMPTY = 2 * OTHER
"""Among the characters that something begins with: it may be nothing."""

_Lexeme = tuple[type[ASTNode], str]
"""A kind of node, with the rule's name, the text, or the class as it is written."""


def mark_lexemes(rules: Mapping[str, RuleNode]) -> None:
    """Of the rules, and of the literals in them."""
    users = _users(rules)
    terminals, split = _without_recursion(rules, users), set[str]()
    literals = [node for node in nodes_in(rules.values()) if isinstance(node, Literal)]
    try:
        steps = _Steps(MAX_STEPS)
        following = _Following(rules, users, steps)
        while taking := _Lexer(rules, terminals, split, steps).taking(following.by_lexeme):
            for text in [text for kind, text in taking if kind is Literal]:
                split.add(text)
                following.split(text)
            _take_out([name for kind, name in taking if kind is RuleRefNode], terminals, users)
    except (_TooManySteps, RecursionError):  # rules may name each other thousands deep
        terminals, split = set(), {literal.value for literal in literals}
    for rule in rules.values():
        rule.rule_is_terminal = rule.name in terminals
    for literal in literals:
        literal.is_split = len(literal.value) > 1 and literal.value in split


class _TooManySteps(Exception):
    """More than were left."""


class _Steps:
    """What all of it may take."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self, number: int = 1) -> None:
        self._left -= number
        if self._left < 0:
            raise _TooManySteps


# -- rules --------------------------------------------------------------------------------------------


def _users(rules: Mapping[str, RuleNode]) -> dict[str, set[str]]:
    """By a rule's name, the names of those that have it in them."""
    users: dict[str, set[str]] = {name: set() for name in rules}
    for rule in rules.values():
        for node in nodes_in([rule]):
            if isinstance(node, RuleRefNode):
                users[node.name].add(rule.name)
    return users


def _without_recursion(rules: Mapping[str, RuleNode], users: Mapping[str, set[str]]) -> set[str]:
    """Those of literals and classes alone, and of such rules; never `root`, where the text begins."""
    missing = dict.fromkeys(rules, 0)  # names in it that are not known to be such yet
    for names in users.values():
        for name in names:
            missing[name] += 1
    found = [name for name in rules if not missing[name] and name != "root"]
    for name in found:
        for user in users[name]:
            missing[user] -= 1
            if not missing[user] and user != "root":
                found.append(user)
    return set(found)


def _take_out(names: list[str], terminals: set[str], users: Mapping[str, set[str]]) -> None:
    """With all that have them in them: Lark makes terminals of terminals only."""
    for name in names:
        if name in terminals:
            terminals.remove(name)
            names += users[name]


# -- characters ---------------------------------------------------------------------------------------


def _lexeme(node: ASTNode) -> _Lexeme:
    match node:
        case RuleRefNode():
            return RuleRefNode, node.name
        case CharClass():
            return CharClass, node.rx
        case Literal():
            return Literal, node.value
    raise TypeError(type(node))


class _Following:
    """The characters that may come behind each rule, literal and class, wherever it is."""

    def __init__(self, rules: Mapping[str, RuleNode], users: Mapping[str, set[str]], steps: _Steps) -> None:
        self.by_lexeme: dict[_Lexeme, int] = defaultdict(int)
        self._steps = steps
        self._begins_by_rule = dict.fromkeys(rules, 0)
        waiting = deque(rules)
        while waiting:
            name = waiting.popleft()
            begins = self._begins(rules[name].alternatives)
            if begins != self._begins_by_rule[name]:
                self._begins_by_rule[name] = begins
                waiting += users[name]
        self._changed = deque(rules)
        while self._changed:
            name = self._changed.popleft()
            self._put(rules[name].alternatives, self.by_lexeme[RuleRefNode, name])

    def split(self, text: str) -> None:
        """Each character of a literal is one itself, and the next comes behind it."""
        for char, behind in pairwise(text):
            self.by_lexeme[Literal, char] |= char_set(behind)
        self.by_lexeme[Literal, text[-1]] |= self.by_lexeme[Literal, text]

    def _begins(self, node: ASTNode) -> int:
        self._steps.take()
        match node:
            case RuleRefNode():
                return self._begins_by_rule[node.name]
            case CharClass():
                return node.chars
            case Literal():
                return char_set(node.value[0]) if node.value else _EMPTY
            case Repetition():
                return self._begins(node.node) | (0 if node.min_times else _EMPTY)
            case AlternativeNode():
                begins = 0
                for each in node.alternatives:
                    begins |= self._begins(each)
                return begins
            case SequenceNode():
                begins = _EMPTY
                for each in node.nodes:
                    begins = begins & ANY | self._begins(each)
                    if not begins & _EMPTY:
                        break
                return begins
        raise TypeError(type(node))

    def _put(self, node: ASTNode, after: int) -> None:
        """Behind a part of a rule, and so behind what it ends with."""
        self._steps.take()
        match node:
            case Repetition():
                self._put(node.node, after | self._begins(node.node) & ANY)
            case AlternativeNode():
                for each in node.alternatives:
                    self._put(each, after)
            case SequenceNode():
                for each in reversed(node.nodes):
                    self._put(each, after)
                    begins = self._begins(each)
                    after = begins & ANY | after if begins & _EMPTY else begins
            case _:
                known = self.by_lexeme[_lexeme(node)]
                self.by_lexeme[_lexeme(node)] = known | after
                if isinstance(node, RuleRefNode) and known | after != known:
                    self._changed.append(node.name)


# -- lexemes ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Ends:
    """Of a part of a lexeme: the places that it begins and ends with."""

    first: list[int]
    last: list[int]
    may_be_empty: bool


class _Lexer:
    """All lexemes as one automaton: its places are the characters that are written in them."""

    def __init__(
        self, rules: Mapping[str, RuleNode], terminals: set[str], split: set[str], steps: _Steps
    ) -> None:
        """terminals: rules that are lexemes where others name them. split: literals that are none."""
        self._rules = rules
        self._steps = steps
        self._chars: list[int] = []  # by place
        self._next: list[list[int]] = []
        self._owner: list[_Lexeme] = []
        self._first: list[int] = []
        self._last: set[int] = set()
        spelled = (rule for rule in rules.values() if rule.name not in terminals)
        leaves = {_lexeme(node): node for node in nodes_in(spelled) if _is_leaf(node)}
        for lexeme, node in leaves.items():
            kind, written = lexeme
            if kind is Literal and written in split:
                for char in set(written):
                    self._add_lexeme(Literal(char), (Literal, char))
            elif kind is not RuleRefNode or written in terminals:
                self._add_lexeme(node, lexeme)

    def _add_lexeme(self, node: ASTNode, lexeme: _Lexeme) -> None:
        ends = self._add(node, lexeme)
        self._first += ends.first
        self._last.update(ends.last)

    def taking(self, following: Mapping[_Lexeme, int]) -> set[_Lexeme]:
        """Those that go on with what may follow one that is whole."""
        found: set[_Lexeme] = set()
        seen: set[frozenset[int]] = set()
        waiting = [frozenset(self._first)]
        for places in waiting:  # where a next character may be
            for state in self._read(places) - seen:
                seen.add(state)
                if len(state) == 1 and self._owner[min(state)][0] is Literal:
                    continue  # alone up to its end
                ended = 0
                for place in state & self._last:
                    ended |= following[self._owner[place]]
                places_behind = frozenset(behind for place in state for behind in self._next[place])
                self._steps.take(len(state) + len(places_behind))
                found |= {self._owner[place] for place in places_behind if self._chars[place] & ended}
                waiting.append(places_behind)
        return found

    def _read(self, places: frozenset[int]) -> set[frozenset[int]]:
        """By each character that there may be, the places that have it."""
        if len(places) <= 1:
            return {places} if places else set()
        left = 0
        for place in places:
            left |= self._chars[place]
        read = set()
        while left:
            char = left & -left
            having = frozenset(place for place in places if self._chars[place] & char)
            self._steps.take(len(places))
            alike = left
            for place in having:
                alike &= self._chars[place]
            for place in places - having:
                alike &= ~self._chars[place]
            left &= ~alike
            read.add(having)
        return read

    def _add(self, node: ASTNode, owner: _Lexeme) -> _Ends:
        self._steps.take()
        match node:
            case RuleRefNode():
                return self._add(self._rules[node.name].alternatives, owner)
            case CharClass():
                return self._add_chars([node.chars], owner)
            case Literal():
                return self._add_chars([char_set(char) for char in node.value], owner)
            case Repetition():
                return self._add_repeated(node, owner)
            case AlternativeNode():
                parts = [self._add(each, owner) for each in node.alternatives]
                return _Ends(
                    [place for part in parts for place in part.first],
                    [place for part in parts for place in part.last],
                    any(part.may_be_empty for part in parts),
                )
            case SequenceNode():
                whole = _Ends([], [], may_be_empty=True)
                for each in node.nodes:
                    self._append(whole, self._add(each, owner))
                return whole
        raise TypeError(type(node))

    def _add_chars(self, chars: list[int], owner: _Lexeme) -> _Ends:
        begin = len(self._chars)
        end = begin + len(chars)
        self._chars += chars
        self._owner += [owner] * len(chars)
        self._next += [[place] for place in range(begin + 1, end)]
        if not chars:
            return _Ends([], [], may_be_empty=True)
        self._next.append([])
        return _Ends([begin], [end - 1], may_be_empty=False)

    def _add_repeated(self, node: Repetition, owner: _Lexeme) -> _Ends:
        """Counted ones as any number, none too: it is enough to find too many that go on."""
        ends = self._add(node.node, owner)
        if node.max_times != 1:
            self._join(ends.last, ends.first)
        return _Ends(ends.first, ends.last, ends.may_be_empty or not node.min_times)

    def _append(self, whole: _Ends, part: _Ends) -> None:
        self._join(whole.last, part.first)
        if whole.may_be_empty:
            whole.first += part.first
        whole.last = whole.last + part.last if part.may_be_empty else part.last
        whole.may_be_empty &= part.may_be_empty

    def _join(self, ends: Iterable[int], begins: list[int]) -> None:
        for place in ends:
            self._steps.take(1 + len(begins))
            self._next[place] += begins


def _is_leaf(node: ASTNode) -> bool:
    return isinstance(node, RuleRefNode | CharClass | Literal)
