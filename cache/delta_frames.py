"""The delta channel's wire: a generation's deltas from a replica to the Router that asked for it.

    Router  -- TCP connect -->  replica
    Hello                 -->            which Router this is: a name that only its own calls mention
                          <--  Welcome   from now on calls that mention it are answered here
                          <--  Piece     of one stream, numbered from 0
    Flow                  -->            no more of this stream for now, or go on with it

A frame is its length in four bytes, little endian, and a message in msgpack with strict types. Calls go
through Serve as before, and so do their failures; a stream that a call opened is named by `ReplyTo`.
Knows bytes; knows no sockets (`replica/delta_server.py`, `router/deltas/connection.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec

from cache.errors import WireError
from cache.messages import Delta, FinishReason
from cache.wire import WireFormat, within

FORMAT_VERSION = 1
CHANNEL_BYTES = 16  # random: nobody guesses it
MAX_PIECE_BYTES = 16 << 20  # a million tokens with their text: what waited for a slow client is one piece
MAX_REQUEST_BYTES = 256  # of what a Router sends
_LENGTH_BYTES = 4

NonNegative = Annotated[int, msgspec.Meta(ge=0)]


class ReplyTo(NamedTuple):
    """Where a call's deltas are wanted; travels as the call's second argument."""

    channel: bytes  # of the Router that calls
    stream: int  # names the call among all that this Router has made


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    channel: Annotated[bytes, msgspec.Meta(min_length=CHANNEL_BYTES, max_length=CHANNEL_BYTES)]


class Welcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A delta without logprobs: calls that ask for those are answered by Serve."""

    stream: NonNegative
    number: NonNegative  # 0, 1, 2, ... within its stream
    text: str
    token_ids: tuple[NonNegative, ...]
    cached_tokens: NonNegative
    finish_reason: FinishReason | None
    choice: NonNegative

    @property
    def delta(self) -> Delta:
        return Delta(self.text, self.token_ids, self.cached_tokens, self.finish_reason, choice=self.choice)


class Flow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    stream: NonNegative
    is_paused: bool


_HELLO = WireFormat(Hello, "channel greeting", version=FORMAT_VERSION, max_bytes=MAX_REQUEST_BYTES)
_WELCOME = WireFormat(Welcome, "channel welcome", version=FORMAT_VERSION, max_bytes=MAX_REQUEST_BYTES)
_ENCODER = msgspec.msgpack.Encoder()
_PIECES = msgspec.msgpack.Decoder(Piece)
_FLOWS = msgspec.msgpack.Decoder(Flow)


def hello(channel: bytes) -> bytes:
    return _frame(_HELLO.encode(Hello(FORMAT_VERSION, channel)))


def read_hello(message: bytes) -> bytes:
    """The Router's channel. Raises WireError."""
    return _HELLO.decode(message).channel


def welcome() -> bytes:
    return _frame(_WELCOME.encode(Welcome(FORMAT_VERSION)))


def read_welcome(message: bytes) -> None:
    """Raises WireError for anything else."""
    _WELCOME.decode(message)


def piece(stream: int, number: int, delta: Delta) -> bytes:
    """Raises WireError for a delta that has logprobs, or is larger than a receiver takes."""
    if delta.logprobs is not None or delta.prompt_logprobs is not None:
        raise WireError("logprobs do not travel on a delta channel")
    message = Piece(
        stream,
        number,
        delta.text,
        delta.token_ids,
        delta.cached_tokens,
        delta.finish_reason,
        delta.choice,
    )
    try:
        return _frame(within(_ENCODER.encode(message), MAX_PIECE_BYTES, "piece"))
    except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeError) as error:
        raise WireError(f"cannot encode piece: {type(error).__name__}") from error


def read_piece(message: bytes) -> Piece:
    """Raises WireError."""
    try:
        return _PIECES.decode(message)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise WireError(f"malformed piece: {error}") from error


def flow(stream: int, *, is_paused: bool) -> bytes:
    return _frame(_ENCODER.encode(Flow(stream, is_paused)))


def read_flow(message: bytes) -> Flow:
    """Raises WireError."""
    try:
        return _FLOWS.decode(message)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise WireError(f"malformed flow: {error}") from error


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


def _frame(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message
