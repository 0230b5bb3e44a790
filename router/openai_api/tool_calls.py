"""Calls of tools, found in what a model writes: from text deltas to text and calls.

The format is the one that Hermes and Qwen models were taught: `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`, as many as the model likes, text before and between. Nothing forces the model to keep to
it: what is not a well-formed call is answered as the text it is. A call is given out when it is complete, so
that streaming and not streaming tell the same, or when the answer is cut off, as far as it came. Only where a
structure holds the model to calls is one known by its beginning, and its arguments go out as they come.
Knows text and JSON; knows neither tokens nor HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from enum import StrEnum

from cache.messages import FinishReason
from router.openai_api.call_json import HEAD, is_cut_string, parse_call, parse_cut_call
from router.openai_api.object_end import ObjectEnd
from router.openai_api.pieces import Piece, PlainReader, Reader, ToolCall, certain, new_call_id

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class ToolFormat(StrEnum):
    """How a model writes its calls."""

    HERMES = "hermes"


def renders_tools(template: str | None) -> bool:
    """Whether a chat template looks at `tools` at all."""
    return template is not None and re.search(r"\btools\b", template) is not None


def format_of(template: str | None) -> ToolFormat | None:
    """The format that a chat template teaches; None if it is none that is known here."""
    if template is not None and renders_tools(template) and _JSON_CALL.search(template):
        return ToolFormat.HERMES
    return None


# The tag alone says little: Qwen3-Coder's and GLM's calls stand in the same one, and are no JSON
# (`<tool_call>\n<function=...>`, `<tool_call>name\n<arg_key>`). So an object's members have to follow it, as
# text of the template or as what it makes of a call, before any other tag does.
_JSON_CALL = re.compile(OPEN + r"""[^<]*?(?:\\?["'](?:name|arguments)\\?["']\s*:|\|\s*tojson)""")


class HermesReader:
    """Finds calls in the Hermes format.

    text ... [undecided)   or, inside a call,   <tool_call> [body so far)

    Where calls are held, and arguments have begun:   [behind what was given out)
    """

    def __init__(
        self,
        *,
        is_parallel: bool = True,
        is_held: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """is_parallel: False drops everything after the first call. is_held: `call_grammar.py`'s structure
        holds the model to well-formed calls behind every tag."""
        self._is_parallel = is_parallel
        self._is_held = is_held
        self._arguments: ObjectEnd | None = None  # of a held call that has been given out
        self._new_id = new_id
        self._buffer = ""
        self._is_inside = False
        self._lead = ""  # white space before the call that has begun
        self._searched = 0  # characters of `_buffer` that hold no end of a call
        self._num_calls = 0

    def read(self, text: str, ending: FinishReason | None) -> Piece:
        """See `Reader`."""
        self._buffer += text
        texts: list[str] = []
        calls: list[ToolCall] = []
        more = self._take_arguments() if self._arguments is not None else ""
        while self._step(texts, calls, ending):
            pass
        is_cut = ending is not None and self._arguments is not None and not self._arguments.is_over
        return Piece("".join(texts), tuple(calls), more=more, is_cut=is_cut)

    def _step(self, texts: list[str], calls: list[ToolCall], ending: FinishReason | None) -> bool:
        """One text or one call; False when more must come first."""
        if self._arguments is not None:
            return False  # more of the call must come first
        if self._num_calls and not self._is_parallel:
            self._buffer = ""
            return False
        if self._is_inside:
            if self._is_held and (head := HEAD.match(self._buffer)) is not None:
                return self._begin_call(head, calls)
            return self._take_call(texts, calls, ending)
        start = self._buffer.find(OPEN)
        if start >= 0:
            texts.append(self._buffer[:start].rstrip())
            self._lead = self._buffer[len(texts[-1]) : start]
            self._buffer = self._buffer[start + len(OPEN) :]
            self._is_inside = True
            self._searched = 0
            return True
        if ending is None:
            # White space before a call is the call's.
            end = len(self._buffer[: certain(self._buffer, OPEN)].rstrip())
            texts.append(self._buffer[:end])
            self._buffer = self._buffer[end:]
        else:
            texts.append(self._buffer.rstrip() if self._num_calls else self._buffer)
            self._buffer = ""
        return False

    def _begin_call(self, head: re.Match[str], calls: list[ToolCall]) -> bool:
        """A held call, with its arguments as far as they are here."""
        self._buffer = self._buffer[head.end() :]
        self._arguments = ObjectEnd()
        arguments = self._take_arguments()
        calls.append(ToolCall(self._new_id(), json.loads(head[1]), arguments))
        self._num_calls += 1
        return not self._is_inside and bool(self._buffer)

    def _take_arguments(self) -> str:
        """What has come of a held call's arguments. What closes the call is taken with their end."""
        assert self._arguments is not None
        end = self._arguments.find(self._buffer)
        found, self._buffer = self._buffer[:end], self._buffer[end:]
        if self._arguments.is_over and (closed := self._buffer.find(CLOSE)) >= 0:
            self._buffer = self._buffer[closed + len(CLOSE) :]
            self._arguments, self._is_inside = None, False
        return found

    def _take_call(self, texts: list[str], calls: list[ToolCall], ending: FinishReason | None) -> bool:
        end = self._buffer.find(CLOSE, self._searched)
        if end < 0 and ending is None:
            self._searched = max(0, len(self._buffer) - len(CLOSE) + 1)
            return False
        body = self._buffer if end < 0 else self._buffer[:end]
        call = parse_call(body, self._new_id)
        if call is None and end < 0 and ending is FinishReason.LENGTH:
            call = parse_cut_call(body, CLOSE, self._new_id)
        if call is None and end >= 0 and is_cut_string(body):
            self._searched = end + len(CLOSE)  # the tag stands inside an argument
            return True
        after = len(self._buffer) if end < 0 else end + len(CLOSE)
        if call is None:
            if (last := body.rfind(OPEN)) >= 0:  # this tag was but a word, in a thought or a call gone wrong
                after = len(body[:last].rstrip())
            texts.append(self._lead + OPEN + self._buffer[:after])
        else:
            calls.append(call)
            self._num_calls += 1
        self._buffer = self._buffer[after:]
        self._is_inside = False
        return bool(self._buffer)


def reader_for(found: ToolFormat | None, *, is_parallel: bool, is_held: bool) -> Reader:
    """found: None = calls are not looked for."""
    return PlainReader() if found is None else HermesReader(is_parallel=is_parallel, is_held=is_held)
