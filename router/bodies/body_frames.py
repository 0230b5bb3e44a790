"""What the pieces of a body channel carry, and what a request and its answer say of it.

    request   x-warmpath-reply-to: <channel>-<stream>    its answer may go to that channel's connection
              x-warmpath-reply-to: -                     it may not: no connection, or an unknown path
              its scope's `warmpath.body`                its body, whole
    answer    x-warmpath-body: channel                   all of it but the last piece has gone there
              x-warmpath-body: dropped                   some of it has gone there; its client takes nothing
              x-warmpath-body: call                      it comes as it would without any of this
              x-warmpath-bodies-at: tcp://host:port      there is no such connection; one may be made here

The headers are between Router and proxy: clients neither send nor see them. A stream's first piece is its
start, the others are parts of its body.
"""

from __future__ import annotations

import re

import msgspec
from starlette.types import Message

from cache.channel.frames import CHANNEL_BYTES, NonNegative, PieceFormat, ReplyTo, frame
from cache.errors import WireError

REPLY_TO_HEADER = b"x-warmpath-reply-to"
NO_CHANNEL = b"-"  # who asks takes answers by channel, but not yet this one
BODY_HEADER = b"x-warmpath-body"
BODIES_AT_HEADER = b"x-warmpath-bodies-at"
BY_CHANNEL, DROPPED, BY_CALL = b"channel", b"dropped", b"call"
REQUEST_BODY_KEY = "warmpath.body"
END = b""  # the content of a stream's last piece, and of no other

_REPLY_TO = re.compile(rb"([0-9a-f]{%d})-([0-9]{1,18})" % (2 * CHANNEL_BYTES))


class BodyPiece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    stream: NonNegative
    number: NonNegative  # 0, 1, 2, ... within its stream
    content: bytes


class _Start(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    status: int
    headers: list[tuple[bytes, bytes]]


_ENCODER = msgspec.msgpack.Encoder()
_STARTS = msgspec.msgpack.Decoder(_Start)
_PIECES = msgspec.msgpack.Decoder(BodyPiece)


def _encode(stream: int, number: int, content: bytes) -> bytes:
    return frame(_ENCODER.encode(BodyPiece(stream, number, content)))


def _decode(message: bytes) -> BodyPiece:
    """Raises WireError."""
    try:
        return _PIECES.decode(message)
    except msgspec.MsgspecError as error:
        raise WireError(f"malformed piece of a body: {error}") from error


BODIES: PieceFormat[bytes] = PieceFormat(_encode, _decode)


def start_content(start: Message) -> bytes:
    """ASGI's `http.response.start` as a piece's content."""
    return _ENCODER.encode(_Start(start["status"], list(start["headers"])))


def read_start(content: bytes) -> Message:
    """Inverse of `start_content`. Raises WireError for anything else."""
    try:
        start = _STARTS.decode(content)
    except msgspec.MsgspecError as error:
        raise WireError(f"malformed start of an answer: {error}") from error
    return {"type": "http.response.start", "status": start.status, "headers": start.headers}


def reply_to_text(reply_to: ReplyTo) -> bytes:
    """The header's value."""
    return b"%s-%d" % (reply_to.channel.hex().encode(), reply_to.stream)


def read_reply_to(text: bytes) -> ReplyTo | None:
    """Inverse of `reply_to_text`; None for anything else."""
    found = _REPLY_TO.fullmatch(text)
    return None if found is None else ReplyTo(bytes.fromhex(found[1].decode()), int(found[2]))
