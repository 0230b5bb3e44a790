"""A call of a function as JSON, an object with its name and its arguments: all of it, or its beginning.

Arguments are passed on as they are written. Knows the object; knows neither tags nor what is around it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from pydantic_core import from_json

from router.openai_api.pieces import ToolCall


def parse_call(body: str, new_id: Callable[[], str]) -> ToolCall | None:
    """The call in the text between the tags; None if there is none."""
    try:
        members = _members(body)
    except (ValueError, RecursionError):
        return None
    name, _ = members.get("name", (None, ""))
    arguments, text = members.get("arguments", ({}, "{}"))
    if not isinstance(name, str) or not name or not _is_unicode(name) or not isinstance(arguments, dict):
        return None
    return ToolCall(new_id(), name, text)


def parse_cut_call(body: str, close: str, new_id: Callable[[], str]) -> ToolCall | None:
    """The call that the text after the tag begins, with its arguments as far as they came.

    close: the tag that would end it. None if it is none, or was cut off before its arguments: nobody can tell
    yet that it becomes one.
    """
    head = HEAD.match(body)
    if head is None:
        return None
    try:
        name = json.loads(head[1])
    except ValueError:
        return None
    text = body[head.end() :]
    if not name or not _is_unicode(name):
        return None
    if is_cut_object(text):
        return ToolCall(new_id(), name, text)
    try:
        _, end = _JSON.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    left = text[_skip(text, end) :]  # of what closes the call
    if left and not (left[0] == "}" and close.startswith(left[_skip(left, 1) :])):
        return None
    return ToolCall(new_id(), name, text[:end])


def is_cut_object(text: str) -> bool:
    """Whether it is the beginning of a JSON object, and not all of it. No white space stands before it."""
    if not text.startswith("{"):
        return False
    try:
        from_json(text, allow_inf_nan=False)
    except ValueError as error:
        # Not by `allow_partial`: that takes whatever follows a value for the end of what is there.
        return str(error).startswith("EOF while parsing")
    return False


def is_json_object(text: str) -> bool:
    """Whether it is one, with nothing else around it but white space."""
    try:
        _members(text)
    except (ValueError, RecursionError):
        return False
    return True


def _members(body: str) -> dict[str, tuple[object, str]]:
    """An object's members, as values and as they are written. The last of equal names counts.

    A call's arguments are passed on as they are written: to read and write them would change numbers that
    Python's floats do not hold, and so what a schema said of them. Raises ValueError for what is no object.
    """
    members: dict[str, tuple[object, str]] = {}
    at = _after(body, 0, "{")
    if body.startswith("}", at):
        _check_end(body, at + 1)
        return members
    while True:
        name, end = _JSON.raw_decode(body, at)
        if not isinstance(name, str):
            raise ValueError("an object's names are strings")
        start = _after(body, _skip(body, end), ":")
        value, end = _JSON.raw_decode(body, start)
        members[name] = (value, body[start:end])
        at = _skip(body, end)
        if body.startswith("}", at):
            _check_end(body, at + 1)
            return members
        at = _after(body, at, ",")


def _skip(text: str, start: int) -> int:
    """Where white space that begins there ends."""
    found = _JSON_SPACE.match(text, start)
    assert found is not None
    return found.end()


def _after(text: str, start: int, mark: str) -> int:
    """Where what follows the mark begins, white space around it left out. Raises ValueError without one."""
    at = _skip(text, start)
    if not text.startswith(mark, at):
        raise ValueError(f"{mark} is missing")
    return _skip(text, at + 1)


def _check_end(text: str, start: int) -> None:
    if _skip(text, start) != len(text):
        raise ValueError("something follows the object")


def _refuse_constant(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity, which are no JSON


# Numbers are passed on as they are written, however long: none is read.
_JSON = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=float)
_JSON_SPACE = re.compile(r"[ \t\n\r]*")
# Up to the arguments, in the order that templates teach and `call_grammar.py` holds models to.
HEAD = re.compile(
    r'[ \t\n\r]*{[ \t\n\r]*"name"[ \t\n\r]*:[ \t\n\r]*("(?:[^"\\]|\\.)*")'
    r'[ \t\n\r]*,[ \t\n\r]*"arguments"[ \t\n\r]*:[ \t\n\r]*(?={)'
)


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 has it: JSON can spell halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_cut_string(body: str) -> bool:
    """Whether `body` ends within a JSON string."""
    try:
        json.loads(body)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False
