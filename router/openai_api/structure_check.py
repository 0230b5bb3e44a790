"""Whether a structure can be followed at all, before anything is queued for it: tried over single bytes.

A replica follows it over its model's tokens, and may still find it too complex there; whatever is wrong with
the structure itself shows here. Knows llguidance; knows neither fields nor replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from fractions import Fraction

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from cache.deep_threads import DeepThreads
from cache.engine_report import Distribution, Tally
from cache.errors import QueueFull
from cache.fair_threads import FairThreads
from cache.structure import GrammarLimits, Structure, StructureKind
from router.errors import InvalidField, StructuresBusy
from router.openai_api.gbnf import FROM_GBNF
from router.openai_api.schema_names import is_written_here
from router.openai_api.structures import Part, inner_parts

MAX_REMEMBERED = 1024  # verdicts: a digest and a sentence each, and the structure, 64 KiB at most
MAX_REMEMBERED_BYTES = 16 << 20  # of their structures
NUM_THREADS = 2  # one structure that takes long does not keep everybody's waiting; tenants take turns at them
TRIED_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
PROBED_BYTES = 8  # an object's braces, a quote and a little more: where branches first meet
MAX_TRIES = 200  # parts of a schema tried on their own, to name the one that is wrong
MAX_PLACE_S = 1.0  # for that: each part may take seconds, and nobody else's structure is tried meanwhile
# Of a division by what `multipleOf` says. Each is a state that llguidance visits while it compiles,
# and keeps; no limit of its own counts them: a hundred thousand take half a second and 80 MB.
MAX_REMAINDERS = 100_000

_UNKNOWN_REASON = "it cannot be compiled"

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


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a structure cannot be followed, in words that quote nothing of it but names of keywords."""

    reason: str
    pointer: str | None = None  # to the smallest part of a schema that is refused for it


@dataclass(frozen=True, slots=True)
class CheckStatistics:
    """What was tried since the start; what was remembered was not tried again."""

    num_followed: int
    num_refused: int
    num_pending: int
    tried_s: Distribution  # seconds each took, by `TRIED_BOUNDS_S`


@dataclass(eq=False, slots=True)
class _Asked:
    """One tenant's structure."""

    verdict: Future[Refusal | None] = field(init=False)
    began_s: float | None = None  # when a thread took it, by the checker's clock; None: it waits in line
    num_awaiting: int = 0


class StructureChecker:
    """Asks once for each structure of a tenant's. Owner: the router's event loop.

    What another tenant has asked for is tried again: by the time it takes nobody finds out what that was, and
    nobody's structure stands in somebody else's line.
    """

    def __init__(
        self, limit_s: float, max_pending: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """limit_s: for each, and for its wait until then. max_pending: to be tried at once, beyond which
        others are told to come back."""
        self._limit_s = limit_s
        self._max_pending = max_pending
        self._clock = clock
        self._threads = FairThreads(
            NUM_THREADS, "warmpath-structures", max_pending=max_pending, pool=DeepThreads
        )
        self._asked: OrderedDict[tuple[str, Structure], _Asked] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()  # guards what its threads count
        self._num_followed = self._num_refused = 0
        self._tried_s = Tally(TRIED_BOUNDS_S)

    async def check(self, structure: Structure, param: str, tenant: str = "") -> None:
        """Raises InvalidField, naming `param`, the place and the reason; or the limit it goes beyond.

        Raises StructuresBusy where others' structures leave no time for this one.
        """
        asked = self._ask(structure, tenant)
        refusal = asked.verdict.result() if asked.verdict.done() else await self._awaited(asked, param)
        if refusal is not None:
            where = "" if refusal.pointer is None else f" at {refusal.pointer}"
            raise InvalidField(param, f"'{param}' cannot be followed{where}: {refusal.reason}.")

    def statistics(self) -> CheckStatistics:
        num_pending = self._threads.num_pending
        with self._lock:
            return CheckStatistics(
                self._num_followed, self._num_refused, num_pending, self._tried_s.distribution()
            )

    def close(self) -> None:
        """Idempotent."""
        self._threads.close()

    async def _awaited(self, asked: _Asked, param: str) -> Refusal | None:
        """Its client's leaving takes it out of line, unless others wait for the same."""
        verdict, answered = asked.verdict, asyncio.wrap_future(asked.verdict)
        answered.add_done_callback(_look_at)
        asked.num_awaiting += 1
        came_s = self._clock()
        try:
            while not answered.done() and (left_s := self._left_s(asked, came_s)) > 0:
                await asyncio.wait([answered], timeout=left_s)
        except asyncio.CancelledError:
            if asked.num_awaiting == 1:
                verdict.cancel()
            raise
        finally:
            asked.num_awaiting -= 1
        if verdict.done() and not verdict.cancelled():  # which the loop may not have been told yet
            return verdict.result()
        if verdict.cancelled() or asked.began_s is None:
            raise StructuresBusy(self._max_pending)
        raise InvalidField(
            param, f"'{param}' must compile within {self._limit_s:g} seconds: it is too complex."
        )

    def _left_s(self, asked: _Asked, came_s: float) -> float:
        """Of its own time, once it has begun; before that of what it may wait in line."""
        since_s = came_s if asked.began_s is None else asked.began_s
        return since_s + self._limit_s - self._clock()

    def _ask(self, structure: Structure, tenant: str) -> _Asked:
        key = tenant, structure
        known = self._asked.get(key)
        if known is not None and not known.verdict.cancelled():  # it had to leave, or was left
            self._asked.move_to_end(key)
            return known
        asked = _Asked()
        try:
            asked.verdict = self._threads.submit(tenant, lambda: self._try(structure, asked))
        except QueueFull:
            raise StructuresBusy(self._max_pending) from None
        if known is None:
            self._num_bytes += len(structure.source)
        self._asked[key] = asked
        self._asked.move_to_end(key)
        while len(self._asked) > MAX_REMEMBERED or self._num_bytes > MAX_REMEMBERED_BYTES:
            (_, forgotten), _ = self._asked.popitem(last=False)
            self._num_bytes -= len(forgotten.source)
        return asked

    def _try(self, structure: Structure, asked: _Asked) -> Refusal | None:
        """On a thread: the verdict, counted."""
        began_s = asked.began_s = self._clock()
        try:
            refusal = judge(structure)
        except BaseException as error:  # a Rust library's panic is no Exception
            _log_failure(error, structure)
            refusal = Refusal(_UNKNOWN_REASON)
        with self._lock:
            self._num_followed += refusal is None
            self._num_refused += refusal is not None
            self._tried_s.add(self._clock() - began_s)
        return refusal


def _log_failure(error: BaseException, structure: Structure) -> None:
    """Its place in the code, without its text: that may quote the structure."""
    textless = RuntimeError(type(error).__name__)
    logger.error(
        "structure could not be tried",
        extra={"kind": structure.kind.value, "error_type": type(error).__name__},
        exc_info=(RuntimeError, textless, error.__traceback__),
    )


def _look_at(answered: asyncio.Future[Refusal | None]) -> None:
    """So that nobody complains that its error was never asked for."""
    if not answered.cancelled():
        answered.exception()


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
        return Refusal(_UNKNOWN_REASON)
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
            return _IN_JSON.sub("", matcher.get_error()) or _UNKNOWN_REASON
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
    return _found(_REASONS, lowered) or _UNKNOWN_REASON


def _found(reasons: Sequence[tuple[str, str]], lowered: str) -> str | None:
    return next((reason for pattern, reason in reasons if re.search(pattern, lowered)), None)


_BYTES = LLTokenizer("byte")
