"""Whether a structure can be followed at all: tried over single bytes, and what is said where it cannot be.

    what llguidance says ──> the reason, in our words ──┐
    of a schema: the parts of it, tried one by one ─────┴──> Refusal

A replica follows it over its model's tokens, and may still find it too complex there; whatever is wrong with
the structure itself shows here. Knows llguidance; knows neither fields nor replicas, nor who waits for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from cache.structure import GrammarLimits, Structure, StructureKind
from router.openai_api.gbnf import FROM_GBNF
from router.openai_api.schema_names import is_written_here
from router.openai_api.structures import Part, inner_parts

PROBED_BYTES = 8  # an object's braces, a quote and a little more: where branches first meet
MAX_TRIES = 200  # parts of a schema tried on their own, to name the one that is wrong
MAX_PLACE_S = 1.0  # for that: each part may take seconds, and nobody else's structure is tried meanwhile
# Of a division by what `multipleOf` says. Each is a state that llguidance visits while it compiles,
# and keeps; no limit of its own counts them: a hundred thousand take half a second and 80 MB.
MAX_REMAINDERS = 100_000

UNKNOWN_REASON = "it cannot be compiled"

# What llguidance says of a limit, wherever it was passed, and the limit. It numbers symbols with 16 bits, and
# panics beyond them.
_LIMITS = GrammarLimits()
_MAX_NUMBERED_SYMBOLS = (1 << 16) - 11
_TOO_LARGE = "it is too large: it may have at most {} symbols, a few for each rule, property and value"
_PASSED_LIMITS: tuple[tuple[str, str], ...] = (
    (r"grammar size .*too big", _TOO_LARGE.format(_LIMITS.max_grammar_size)),
    (r"grammar\.symbols\.len\(\)", _TOO_LARGE.format(_MAX_NUMBERED_SYMBOLS)),
    (r"schema too large", "it is too large: give it fewer properties and values"),
    (
        r"current row has",
        f"it is too complex: at most {_LIMITS.max_items_in_row} rules, properties or choices may be open at "
        "one place",
    ),
)

# What llguidance says, and what is said of it: its own words may quote the structure.
_REASONS: tuple[tuple[str, str], ...] = (
    (r"too (big|large|complex|many)|limit", "it is too complex"),
    (r"unsatisfiable|is empty", "no value can have it"),
    (r"no start rule", "it has no rule 'start', where a grammar in Lark's notation begins"),
    (r"number out of range", "a number in it is out of range"),
    (r"unknown format", "its 'format' is not known"),
    (r"invalid type", "its 'type' is none of JSON Schema's"),
    (
        r"look-around|look-ahead|look-behind",
        "a regular expression in it looks around, which is not supported",
    ),
    (
        r"lookarounds not supported yet; word",
        "a regular expression in it asks for a word's boundary, which is not supported",
    ),
    (
        r"^oneof constraints",
        "'oneOf' cannot be enforced where a value may have several of its forms; 'anyOf' can",
    ),
    (r"backreference", "a regular expression in it has back-references, which are not supported"),
    (r"regex", "a regular expression in it cannot be read"),
    (r"pointer|resource|\$ref|anchor|retriev", "a '$ref' in it leads nowhere"),
    (r"must be|expected", "a keyword in it has a value of the wrong type"),
)
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_NAMES_REFUSED = "'propertyNames' cannot be enforced"
_IN_GRAMMAR = re.compile(r"(?:at )?(\d+)\((\d+)\): (?!invalid regex)")
_IN_JSON = re.compile(
    r" at line \d+ column \d+"
)  # of the whole notation: differs between a schema and its parts
_KEYWORD = re.compile(r"[$A-Za-z]{1,40}")
_SCHEMA_IN_GRAMMAR = re.compile(r"%json\s*")
_JSON = json.JSONDecoder()
_TOO_MANY_REMAINDERS = (
    f"all its 'multipleOf' together may have at most {MAX_REMAINDERS} as their least common multiple, "
    "trailing zeros left out"
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a structure cannot be followed, in words that quote nothing of it but names of keywords."""

    reason: str
    pointer: str | None = None  # to the smallest part of a schema that is refused for it


def judge(structure: Structure) -> Refusal | None:
    """None for what can be followed. Takes about a millisecond; a hard one as long as the limits allow."""
    if any(_num_remainders(schema) > MAX_REMAINDERS for schema in _schemas_in(structure)):
        return Refusal(_TOO_MANY_REMAINDERS)
    said = _tried(structure)
    if said is None:
        return None
    if structure.kind is StructureKind.JSON_SCHEMA:
        place = _place(structure, said)
        return Refusal(_beside(_reason(said), place.schema), place.shown())
    if structure.source.startswith(FROM_GBNF) and _IN_GRAMMAR.match(said):  # a place in what was made of it
        return Refusal(UNKNOWN_REASON)
    return Refusal(_reason(said))


def _schemas_in(structure: Structure) -> list[object]:
    """The schema that it is, or those inside its grammar, as far as they are JSON: others are refused."""
    match structure.kind:
        case StructureKind.JSON_SCHEMA:
            return [json.loads(structure.source)]
        case StructureKind.REGEX:
            return []
    found = []
    for begin in _SCHEMA_IN_GRAMMAR.finditer(structure.source):
        with contextlib.suppress(ValueError, RecursionError):
            found.append(_JSON.raw_decode(structure.source, begin.end())[0])
    return found


def _num_remainders(schema: object) -> int:
    """Of all that `multipleOf` says in it, taken together: parts may meet at a number, by `allOf` or `$ref`.

    Trailing zeros are free, and so are digits behind the point.
    """
    num, waiting = 1, [schema]
    for part in waiting:
        if isinstance(part, dict):
            step = part.get("multipleOf")
            if _is_finite(step) and step:
                num = math.lcm(num, _without_zeros(Fraction(str(step)).numerator))
                if num > MAX_REMAINDERS:
                    break
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return num


def _is_finite(value: object) -> bool:
    """Whether it is a number; `math.isfinite` makes an OverflowError of integers beyond floats' range."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _without_zeros(number: int) -> int:
    digits = str(abs(number)).rstrip("0")
    return int(digits)


def _tried(structure: Structure) -> str | None:
    """What llguidance says against it, compiling it and following a few bytes."""
    limits = LLParserLimits(verbose_errors=False, **asdict(_LIMITS))
    matcher = LLMatcher(_BYTES, structure.grammar(), log_level=0, limits=limits)
    for _ in range(PROBED_BYTES):
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            return _IN_JSON.sub("", matcher.get_error()) or UNKNOWN_REASON
        following = _following(mask)
        if following is None or not matcher.consume_token(following):
            break
    return matcher.get_error() or None


def _following(mask: bytes) -> int | None:
    """A byte that may come next, one that begins something if there is one; None at the end."""
    allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
    return next((byte for byte in b'"{[' if byte in allowed), allowed[0] if allowed else None)


def _place(structure: Structure, said: str) -> Part:
    """The smallest part of a schema against which the same is said, as far as it is found in time."""
    root, until_s = json.loads(structure.source), time.perf_counter() + MAX_PLACE_S
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    place, num_tries = Part(root, (), 0), 0
    while True:
        for inner in inner_parts(place):
            if _is_ours(inner):
                continue
            num_tries += 1
            if num_tries > MAX_TRIES or time.perf_counter() > until_s:
                return place
            alone = {**shared, **inner.schema} if isinstance(inner.schema, dict) else inner.schema
            if _tried(Structure(StructureKind.JSON_SCHEMA, json.dumps(alone), structure.is_lenient)) == said:
                place = inner
                break
        else:
            return place


def _is_ours(part: Part) -> bool:
    """Whether the client may never have written it: a record's name, or its values as a definition."""
    return is_written_here(part.schema) or is_written_here({"$ref": part.shown()})


def _beside(reason: str, schema: object) -> str:
    """What names are refused for that could be followed by themselves."""
    beside = [
        name for name in ("minProperties", "maxProperties") if isinstance(schema, dict) and name in schema
    ]
    if reason != _NAMES_REFUSED or not beside:
        return reason
    return f"'propertyNames' beside {' and '.join(map(repr, beside))} cannot be enforced"


def _reason(said: str) -> str:
    if (found := _UNIMPLEMENTED.search(said)) is not None:
        names = [
            name for name in (part.strip(' "') for part in found[1].split(",")) if _KEYWORD.fullmatch(name)
        ]
        return (
            f"{', '.join(repr(name) for name in names)} cannot be enforced"
            if names
            else "it cannot be enforced"
        )
    lowered = said.lower()
    if (limit := _found(_PASSED_LIMITS, lowered.partition("\n")[0])) is not None:  # what follows quotes it
        return limit
    if (found := _IN_GRAMMAR.match(said)) is not None:
        return f"line {found[1]}, column {found[2]} cannot be compiled"
    return _found(_REASONS, lowered) or UNKNOWN_REASON


def _found(reasons: Sequence[tuple[str, str]], lowered: str) -> str | None:
    return next((reason for pattern, reason in reasons if re.search(pattern, lowered)), None)


_BYTES = LLTokenizer("byte")
