"""Messages in channels, found in what a model writes: the format of gpt-oss, named harmony.

    <|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"place": "Ulm"}<|call|>

An answer is messages, each with a header that says in which channel it is and, where it is a call, whose. The
prompt has begun the first header. Thoughts are in `analysis`; what is in other channels is for the user. A
call is one wherever it stands, since its header names a function. What keeps to none of this is text.
Knows text, in which special tokens are spelled; knows neither tokens nor HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from cache.messages import FinishReason
from router.openai_api.call_json import is_cut_object, is_json_object
from router.openai_api.pieces import Piece, ToolCall, certain, new_call_id

_MESSAGE = "<|message|>"
_CHANNEL = "<|channel|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", _CHANNEL)
_END = re.compile("|".join(map(re.escape, _ENDS)))
_BEGINS_NEXT = ("<|start|>", _CHANNEL)  # an end that was left out, and is the next header's beginning
_HEADER_BEGINS = ("<|start|>", _CHANNEL, "<|constrain|>", _MESSAGE, "to=")
_MAX_HEADER = 256  # characters: a function's name has 64; what goes on for longer is none
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


def has_channels(template: str | None) -> bool:
    """Whether a chat template is of a model whose answers are messages in channels."""
    return template is not None and _CHANNEL in template and _MESSAGE in template


class _Kind(Enum):
    TEXT = "for the user"
    THOUGHT = "for nobody"
    CALL = "arguments of a function"


@dataclass(frozen=True, slots=True)
class _Header:
    kind: _Kind
    function: str = ""  # of a call


class ChannelReader:
    """Tells thoughts, texts and calls apart. Messages of one kind come with a line's end between them.

    header [undecided)   or   text ... [undecided)   or   a call's arguments, whole when it ends
    """

    def __init__(
        self, *, finds_calls: bool, is_parallel: bool = True, new_id: Callable[[], str] = new_call_id
    ) -> None:
        """finds_calls: False takes a call for text. is_parallel: False drops all after the first call."""
        self._finds_calls = finds_calls
        self._is_parallel = is_parallel
        self._new_id = new_id
        self._buffer = ""
        self._header: _Header | None = None  # of the message that is read; None: it is still to come
        self._searched = 0  # characters of a call in `_buffer` that hold no end of it
        self._is_new = False  # nothing of the message has been given out
        self._texts: dict[_Kind, list[str]] = {}  # to be given out
        self._told: set[_Kind] = set()  # kinds of which something was
        self._calls: list[ToolCall] = []
        self._num_calls = 0

    def read(self, text: str, ending: FinishReason | None) -> Piece:
        """See `Reader`."""
        self._buffer += text
        self._texts = {_Kind.TEXT: [], _Kind.THOUGHT: []}
        self._calls = []
        while self._step(ending):
            pass
        return Piece(
            "".join(self._texts[_Kind.TEXT]), tuple(self._calls), "".join(self._texts[_Kind.THOUGHT])
        )

    def _step(self, ending: FinishReason | None) -> bool:
        """A header, or what there is of a message; False when more must come first."""
        if self._num_calls and not self._is_parallel:
            self._buffer = ""
            return False
        if self._header is None:
            return self._take_header(is_last=ending is not None)
        return self._take_message(self._header, ending)

    def _take_header(self, *, is_last: bool) -> bool:
        limit = _MAX_HEADER + len(_MESSAGE)
        begun = self._buffer.lstrip()
        is_one = any(mark.startswith(begun) or begun.startswith(mark) for mark in _HEADER_BEGINS)
        end = self._buffer.find(_MESSAGE, 0, limit)
        if is_one and end >= 0:
            self._header = self._header_of(self._buffer[:end])
            self._buffer = self._buffer[end + len(_MESSAGE) :]
        elif is_one and len(self._buffer) < limit:
            if is_last:  # cut off, and no word of it is the user's
                self._buffer = ""
            return False
        else:
            self._header = _Header(_Kind.TEXT)
            self._searched = int(is_one)  # what is too long for a header begins none a second time
        self._is_new = True
        return True

    def _header_of(self, text: str) -> _Header:
        channel, recipient = _CHANNEL_NAME.search(text), _RECIPIENT.search(text)
        function = ""
        if recipient is not None and recipient[1].startswith(_FUNCTIONS):
            function = recipient[1].removeprefix(_FUNCTIONS)
        if function and self._finds_calls:
            return _Header(_Kind.CALL, function)
        is_thought = channel is not None and channel[1] == "analysis"
        return _Header(_Kind.THOUGHT if is_thought else _Kind.TEXT)

    def _take_message(self, header: _Header, ending: FinishReason | None) -> bool:
        is_last = ending is not None
        found = _END.search(self._buffer, self._searched)
        end = found.start() if found is not None else len(self._buffer)
        if found is None and not is_last:
            end = certain(self._buffer, *_ENDS)
        self._searched = 0
        if header.kind is _Kind.CALL:
            if found is None and not is_last:
                self._searched = end
                return False
            is_cut = found is None and ending is FinishReason.LENGTH
            self._call(header.function, self._buffer[:end], is_cut=is_cut)
        else:
            self._tell(header.kind, self._buffer[:end])
        self._buffer = self._buffer[end:]
        if found is None:
            return False
        if found[0] not in _BEGINS_NEXT:
            self._buffer = self._buffer[len(found[0]) :]
        self._header = None
        return bool(self._buffer)

    def _call(self, function: str, arguments: str, *, is_cut: bool) -> None:
        arguments = arguments.strip()
        if is_json_object(arguments) or (is_cut and is_cut_object(arguments)):
            self._calls.append(ToolCall(self._new_id(), function, arguments))
            self._num_calls += 1
        else:
            self._tell(_Kind.TEXT, arguments)

    def _tell(self, kind: _Kind, text: str) -> None:
        if not text:
            return
        if self._is_new and kind in self._told:
            self._texts[kind].append("\n")
        self._texts[kind].append(text)
        self._told.add(kind)
        self._is_new = False
