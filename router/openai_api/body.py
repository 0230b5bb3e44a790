"""From the bytes of a request body to a JSON object, or an error that says what is wrong.

Knows size limits and JSON; knows no fields. Parsing is strict: UTF-8 only, no NaN or Infinity, no lone
surrogates, nested no deeper than the limit (and never deeper than 200, where pydantic-core's parser ends),
so nothing behind it meets such values.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable
from typing import Any

from pydantic_core import from_json

from router.errors import BodyTooLarge, MalformedJson

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


async def read_limited(chunks: AsyncIterator[bytes], declared: str | None, limit_bytes: int) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as that is known, having kept at most the limit.

    declared: the content-length header, trusted only to refuse early.
    """
    if declared is not None and declared.isascii() and declared.isdigit():
        size_bytes = int(declared[:19])
        if size_bytes > limit_bytes:
            raise BodyTooLarge(limit_bytes, size_bytes)
    parts: list[bytes] = []
    total = 0
    async for chunk in chunks:
        total += len(chunk)
        if total > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        parts.append(chunk)
    return b"".join(parts)


def parse_object(content: bytes, max_depth: int) -> dict[str, Any]:
    """The JSON object in `content`. Raises MalformedJson; its message never quotes the content.

    max_depth: of nested arrays and objects, the body itself counted.
    """
    if not content:
        raise MalformedJson("it is empty.")
    try:
        value = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise MalformedJson(_explain(str(error))) from None
    if not isinstance(value, dict):
        raise MalformedJson("it must be an object.")
    # Few brackets cannot be deep: a prompt of many token ids is not walked.
    if content.count(b"[") + content.count(b"{") > max_depth and _is_deeper(value, max_depth):
        raise MalformedJson(f"it is nested deeper than {max_depth} levels.")
    return value


def _is_deeper(value: object, limit: int) -> bool:
    level: list[object] = [value]
    for _ in range(limit):
        level = [child for container in level for child in _containers_in(container)]
        if not level:
            return False
    return True


def _containers_in(container: object) -> list[object]:
    children = container.values() if isinstance(container, dict) else container
    assert isinstance(children, Iterable)
    return [child for child in children if isinstance(child, dict | list)]


def _explain(parser_message: str) -> str:
    cause = next((text for start, text in _KNOWN_CAUSES if start in parser_message), "it cannot be parsed")
    position = _POSITION.search(parser_message)
    where = f" at line {position[1]} column {position[2]}" if position else ""
    return f"{cause}{where}."
