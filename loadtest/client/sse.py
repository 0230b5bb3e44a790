"""Server-sent events out of bytes, in whatever pieces the bytes come. Knows neither HTTP nor JSON.

Source: the WHATWG HTML standard, section "Server-sent events": a line ends in CR LF, LF or CR, a blank line
ends an event, a line that begins with a colon is a comment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from loadtest.client.errors import EventTooLong

MAX_EVENT_BYTES = 16 << 20  # a whole answer's log probabilities fit; a stream without line ends stops here

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    data: bytes  # the data lines, joined by line feeds
    name: str = "message"


class EventParser:
    """One stream's. Feed it in order; it keeps what is not yet a whole event."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._pending = bytearray()  # of a line whose end has not come
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._name = ""
        self._is_first_line = True
        self._had_cr = False  # a line feed that comes next belongs to it

    @property
    def is_inside_event(self) -> bool:
        """Whether a stream that ended here would lose something."""
        return bool(self._pending.removeprefix(_BOM) or self._data)

    def feed(self, piece: bytes) -> list[Event]:
        """The events that this piece completes. Raises EventTooLong."""
        if not piece:
            return []
        if self._had_cr:
            piece = piece.removeprefix(b"\n")
        searched = len(self._pending)
        self._pending += piece
        events: list[Event] = []
        begin = 0
        for end in _LINE_END.finditer(self._pending, searched):
            event = self._line(bytes(self._pending[begin : end.start()]))
            if event is not None:
                events.append(event)
            begin = end.end()
        self._had_cr = begin == len(self._pending) > 0 and self._pending.endswith(b"\r")
        del self._pending[:begin]
        if len(self._pending) + self._data_bytes > self._max_event_bytes:
            raise EventTooLong(self._max_event_bytes)
        return events

    def _line(self, line: bytes) -> Event | None:
        if self._is_first_line:
            line, self._is_first_line = line.removeprefix(_BOM), False
        if not line:
            return self._complete()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._data_bytes += len(value)
        elif field == b"event":
            self._name = value.decode(errors="replace")
        return None

    def _complete(self) -> Event | None:
        """None for a blank line after nothing but comments: the standard sends no event then."""
        event = Event(b"\n".join(self._data), self._name or "message") if self._data else None
        self._data, self._data_bytes, self._name = [], 0, ""
        return event
