"""From the bytes of a request body to a JSON object, or an error that says what is wrong.

Knows limits of size and time, and JSON; knows no fields. Parsing is strict: UTF-8 only, no NaN or Infinity
(also none that is written as `1e400`), no lone surrogates, nested no deeper than the limit (and never deeper
than 200, where pydantic-core's parser ends), so nothing behind it meets such values.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
from pydantic_core import from_json

from cache import heap
from router.errors import BodyTooLarge, BodyTooSlow, MalformedJson

_Container = dict[str, Any] | list[Any]

# Of a body on average, one pause left out: slow mobile networks are faster. Without it a byte now and then
# would keep the room that a large body takes for hours.
LEAST_BYTES_PER_S = 16 << 10

# Parts of a body, of which it has no more than bytes. Four megabytes of empty ones are 1.4 million, and
# looking at each of them as at those of other bodies kept the event loop for 0.8 s. So did ids, for 0.2 s.
_MANY = 10_000
_UNMARKED = bytes(set(range(256)) - set(b'[]{}"'))

# Digits look alike, and so do exponents: then a number beyond floats' range has one of these in it, with an
# exponent of fewer than three digits the second. Texts may have them, too.
_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")
_LARGE = (b"0e000", b"0" * 200)

# The parser's message may quote what it met ("expected value ... got `secret`"): only its known,
# content-free beginnings are passed on, with the position.
_POSITION = re.compile(r"at line (\d+) column (\d+)$")
_KNOWN_CAUSES = (
    ("recursion limit exceeded", "it is nested too deeply"),
    ("EOF while parsing", "it ends too early"),
    ("trailing characters", "there is more after the end of the value"),
    ("trailing comma", "there is a trailing comma"),
    ("expected value", "a value is missing or is not JSON (NaN and Infinity are not)"),
    ("expected ident", "a value is not JSON"),
    ("expected `,` or `}`", "a comma or closing brace is missing"),
    ("expected `,` or `]`", "a comma or closing bracket is missing"),
    ("expected `:`", "a colon is missing"),
    ("key must be a string", "a key is not a string"),
    ("invalid unicode code point", "it is not valid UTF-8"),
    ("control character", "a string has an unescaped control character"),
    ("invalid escape", "a string has an invalid escape"),
    ("lone leading surrogate", "a string has half a surrogate pair"),
    ("unexpected end of hex escape", "a string has half a surrogate pair or a broken escape"),
    ("invalid number", "a number is malformed"),
    ("number out of range", "a number is out of range"),
)


async def read_limited(
    chunks: AsyncIterator[bytes],
    declared: str | None,
    limit_bytes: int,
    max_pause_s: float,
    came: Callable[[int], None] = lambda _: None,
) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as that is known, having kept at most the limit, and
    BodyTooSlow when its next part is not here in time (`due_at`).

    declared: the content-length header, trusted only to refuse early. came: told of every part's bytes
    before it is kept.
    """
    if declared is not None and declared.isascii() and declared.isdigit():
        size_bytes = int(declared[:19])
        if size_bytes > limit_bytes:
            raise BodyTooLarge(limit_bytes, size_bytes)
    parts: list[bytes] = []
    total, loop = 0, asyncio.get_running_loop()
    began_at = loop.time()
    try:
        async with asyncio.timeout_at(due_at(began_at, began_at, 0, max_pause_s)) as limit:
            async for chunk in chunks:
                total += len(chunk)
                if total > limit_bytes:
                    raise BodyTooLarge(limit_bytes)
                came(len(chunk))
                parts.append(chunk)
                limit.reschedule(due_at(began_at, loop.time(), total, max_pause_s))
    except TimeoutError:
        if not limit.expired():
            raise
        raise BodyTooSlow(total, max_pause_s, LEAST_BYTES_PER_S) from None
    return b"".join(parts)


def due_at(began_at: float, now: float, num_bytes: int, max_pause_s: float) -> float:
    """When the next part of a body has to be here, of which so many bytes are; seconds of one clock.

    No pause is longer than `max_pause_s`, and all of them together no longer than one such and the time that
    its bytes take at the least rate.
    """
    return min(now, began_at + num_bytes / LEAST_BYTES_PER_S) + max_pause_s


def parse_object(content: bytes, max_depth: int) -> dict[str, Any]:
    """The JSON object in `content`. Raises MalformedJson; its message never quotes the content.

    max_depth: of nested arrays and objects, the body itself counted.
    """
    content = content.removeprefix(codecs.BOM_UTF8)  # RFC 8259 lets it be ignored
    if not content:
        raise MalformedJson("it is empty.")
    try:
        value = strictly_parsed(content)
    except ValueError as error:
        raise MalformedJson(_explain(str(error))) from None
    if not isinstance(value, dict):
        raise MalformedJson("it must be an object.")
    # Few brackets cannot be deep: a prompt of many token ids is not walked.
    if _num_brackets(content) > max_depth and _is_deeper(value, max_depth, content):
        raise MalformedJson(f"it is nested deeper than {max_depth} levels.")
    return value


def strictly_parsed(content: bytes) -> object:
    """What the JSON says. Raises ValueError; its message may quote the content. On any thread."""
    with heap.without_collections() if len(content) > _MANY else contextlib.nullcontext():
        # To look for a string among those seen before takes longer than to make it: of 300,000 different keys
        # twice as long, of a chat with tools by a third.
        value: object = from_json(content, allow_inf_nan=False, cache_strings=False)
    if _may_overflow(content):
        try:
            json.dumps(value, allow_nan=False, check_circular=False)
        except ValueError:
            raise ValueError("number out of range") from None
    return value


def _num_brackets(content: bytes) -> int:
    """That open. Of a body of 4 MiB `bytes.count` takes ten times as long."""
    marks = np.frombuffer(content, dtype=np.uint8) | 0x20  # which makes one of the other
    return int(np.count_nonzero(marks == ord("{")))


def _may_overflow(content: bytes) -> bool:
    """Whether to look for a number that became infinite: the parser says nothing of it."""
    alike = content.translate(_ALIKE, b"+")
    return any(large in alike for large in _LARGE)


def _is_deeper(value: dict[str, Any], limit: int, content: bytes) -> bool:
    """content: what the value was parsed from, which is faster to look at where the value has many parts."""
    level: list[_Container] = [value]
    num_seen = 0
    for _ in range(limit):
        num_seen += sum(map(len, level))
        if num_seen >= _MANY:
            return _depth(content) > limit
        level = [child for container in level for child in _containers_in(container)]
        if not level:
            return False
    return True


def _containers_in(container: _Container) -> Iterator[_Container]:
    children = container.values() if isinstance(container, dict) else container
    return (child for child in children if isinstance(child, dict | list))


def _depth(content: bytes) -> int:
    """Of the brackets in valid JSON, those in strings left out."""
    unescaped = content.replace(b"\\\\", b"").replace(b'\\"', b"")  # then quotes end strings
    marks = np.frombuffer(unescaped.translate(None, _UNMARKED), dtype=np.uint8)
    is_outside = (marks == ord('"')).cumsum(dtype=np.int32) & 1 == 0
    brackets = marks[is_outside & (marks != ord('"'))]
    steps = (brackets & 2).astype(np.int8) - 1  # 1 for `[` and `{`, -1 for `]` and `}`
    return int(steps.cumsum(dtype=np.int32).max())


def _explain(parser_message: str) -> str:
    cause = next((text for start, text in _KNOWN_CAUSES if start in parser_message), "it cannot be parsed")
    position = _POSITION.search(parser_message)
    where = f" at line {position[1]} column {position[2]}" if position else ""
    return f"{cause}{where}."
