"""A channel's wire: numbered pieces of streams, from the process that makes them to the one that asked.

    reader  -- TCP connect -->  source
    Hello                 -->            which reader this is: a name that only its own calls mention
                          <--  Welcome   from now on calls that mention it are answered here
                          <--  piece     of one stream, numbered from 0
    Flow                  -->            no more of this stream for now, or go on with it

A frame is its length in four bytes, little endian, and a message in msgpack with strict types. Calls go
through Serve as before, and so do their failures; a stream that a call opened is named by `ReplyTo`. What
pieces carry is for their `PieceFormat` to say. Knows bytes; knows no sockets (`server.py`, `connection.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from cache.errors import WireError
from cache.wire import WireFormat

FORMAT_VERSION = 1
CHANNEL_BYTES = 16  # random: nobody guesses it
MAX_PIECE_BYTES = 16 << 20  # far above what senders put into one, a megabyte at most: more is none of ours
MAX_REQUEST_BYTES = 256  # of what a reader sends
_LENGTH_BYTES = 4

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Content = TypeVar("Content")
ContentOut = TypeVar("ContentOut", covariant=True)


class ReplyTo(NamedTuple):
    """Where a call's stream is wanted; travels with the call."""

    channel: bytes  # of the process that calls
    stream: int  # names the call among all that this process has made


class Piece(Protocol[ContentOut]):
    """Part of a stream."""

    @property
    def stream(self) -> int: ...

    @property
    def number(self) -> int:
        """0, 1, 2, ... within its stream."""

    @property
    def content(self) -> ContentOut: ...


@dataclass(frozen=True, slots=True)
class PieceFormat(Generic[Content]):
    """What the pieces of one kind of channel carry. Both raise WireError."""

    encode: Callable[[int, int, Content], bytes]  # stream, number, content
    decode: Callable[[bytes], Piece[Content]]


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    channel: Annotated[bytes, msgspec.Meta(min_length=CHANNEL_BYTES, max_length=CHANNEL_BYTES)]


class Welcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int


class Flow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    stream: NonNegative
    is_paused: bool


_HELLO = WireFormat(Hello, "channel greeting", version=FORMAT_VERSION, max_bytes=MAX_REQUEST_BYTES)
_WELCOME = WireFormat(Welcome, "channel welcome", version=FORMAT_VERSION, max_bytes=MAX_REQUEST_BYTES)
_ENCODER = msgspec.msgpack.Encoder()
_FLOWS = msgspec.msgpack.Decoder(Flow)


def hello(channel: bytes) -> bytes:
    return frame(_HELLO.encode(Hello(FORMAT_VERSION, channel)))


def read_hello(message: bytes) -> bytes:
    """The reader's channel. Raises WireError."""
    return _HELLO.decode(message).channel


def welcome() -> bytes:
    return frame(_WELCOME.encode(Welcome(FORMAT_VERSION)))


def read_welcome(message: bytes) -> None:
    """Raises WireError for anything else."""
    _WELCOME.decode(message)


def flow(stream: int, *, is_paused: bool) -> bytes:
    return frame(_ENCODER.encode(Flow(stream, is_paused)))


def read_flow(message: bytes) -> Flow:
    """Raises WireError."""
    try:
        return _FLOWS.decode(message)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise WireError(f"malformed flow: {error}") from error


def frame(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


class FrameReader:
    """Bytes as they come, cut anywhere, to whole messages. Keeps no more than one message of the limit."""

    def __init__(self, max_bytes: int) -> None:
        """max_bytes: of a message."""
        self._max_bytes = max_bytes
        self._rest = bytearray()  # the beginning of a message that is not whole yet
        self._wanted = 0  # bytes of it before it can be: a large one comes in hundreds of parts

    def feed(self, received: bytes) -> Iterator[bytes]:
        """The messages that are whole now, in order. Raises WireError for one that is too large."""
        if self._rest:
            self._rest += received
            if len(self._rest) < self._wanted:
                return
            received = bytes(self._rest)
            self._rest.clear()
        begin, end, self._wanted = 0, len(received), _LENGTH_BYTES
        while end - begin >= _LENGTH_BYTES:
            length = int.from_bytes(received[begin : begin + _LENGTH_BYTES], "little")
            if length > self._max_bytes:
                raise WireError(f"a message of {length} bytes, at most {self._max_bytes} are taken")
            first = begin + _LENGTH_BYTES
            if first + length > end:
                self._wanted = _LENGTH_BYTES + length
                break
            yield received[first : first + length]
            begin = first + length
        self._rest += received[begin:]
