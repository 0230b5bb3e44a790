"""What an answer's text must look like: the value that crosses the border, and what a grammar may cost.

A router checks a structure before anything is queued, a replica follows it token by token: both read
it as the same grammar and within the same limits, so both are here. The notation is llguidance's, which is
JSON around a schema or a Lark grammar; it is only written here. Knows no tokens and no tokenizer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cache.pickled import across_versions

# Between the parts of a JSON text a model may put so much white space: enough to indent, and an end to a
# model that would put nothing else.
WHITE_SPACE = r"[ \t\n\r]{0,32}"


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What a grammar may cost, in the units of `llguidance.LLParserLimits`."""

    initial_lexer_fuel: int = 1_000_000  # about 20 ms
    step_lexer_fuel: int = 100_000  # about 7 ms: the longest that one mask may keep a step waiting
    step_max_items: int = 50_000  # about 3 ms
    max_items_in_row: int = 2_000
    max_lexer_states: int = 16_384  # of one to two KiB
    max_grammar_size: int = 200_000


class StructureKind(StrEnum):
    JSON_SCHEMA = "json_schema"  # source: the schema, as JSON; properties come in its order
    REGEX = "regex"  # source: what the whole text matches
    GRAMMAR = "grammar"  # source: a Lark grammar, its first rule `start`


@across_versions
@dataclass(frozen=True, slots=True)
class Structure:
    """What the whole output of a generation has to be. Checked where it was built (the router's edge)."""

    kind: StructureKind
    source: str
    is_lenient: bool = False  # of a schema: keywords that cannot be followed are left out of account

    def grammar(self) -> str:
        """The same in llguidance's notation. Raises ValueError for a source that is no JSON."""
        match self.kind:
            case StructureKind.JSON_SCHEMA:
                return _notation("json_schema", _with_options(json.loads(self.source), self.is_lenient))
            case StructureKind.REGEX:
                return _notation("lark_grammar", f"start: /{_between_slashes(self.source)}/")
            case StructureKind.GRAMMAR:
                return _notation("lark_grammar", self.source)

    def as_rule(self) -> str:
        """The same as the right side of a rule, for a grammar that it is a part of.

        Raises ValueError for a source that is no JSON, and for a grammar: its rules' names are its own.
        """
        match self.kind:
            case StructureKind.JSON_SCHEMA:
                schema = _with_options(json.loads(self.source), self.is_lenient)
                return f"%json {json.dumps(schema, ensure_ascii=False)}"
            case StructureKind.REGEX:
                return f"/{_between_slashes(self.source)}/"
            case StructureKind.GRAMMAR:
                raise ValueError("a grammar is no part of another")


def _notation(kind: str, content: object) -> str:
    return json.dumps({"grammars": [{kind: content}]}, ensure_ascii=False)


def _with_options(schema: Any, is_lenient: bool) -> object:
    """The schema with how to write JSON; a client's own options of that kind do not count."""
    if not isinstance(schema, dict):
        return schema if schema is False else _with_options({}, is_lenient)
    return {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE, "lenient": is_lenient}}


def _between_slashes(regex: str) -> str:
    """As Lark wants it: no bare slash and no line's end."""
    written, is_escaped = [], False
    for char in regex:
        if is_escaped or char not in "/\n":
            written.append("n" if is_escaped and char == "\n" else char)
        else:
            written.append(r"\/" if char == "/" else r"\n")
        is_escaped = char == "\\" and not is_escaped
    return "".join(written)
