"""The body channel's bytes and headers: what goes out comes in; nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.channel.frames import CHANNEL_BYTES, MAX_PIECE_BYTES, FrameReader, ReplyTo
from cache.errors import WireError
from router.bodies.body_frames import BODIES, read_reply_to, read_start, reply_to_text, start_content

channels = st.binary(min_size=CHANNEL_BYTES, max_size=CHANNEL_BYTES)


@given(st.integers(0, 2**60), st.integers(0, 2**31), st.binary(max_size=200))
def test_a_piece_arrives(stream: int, number: int, content: bytes) -> None:
    (message,) = FrameReader(MAX_PIECE_BYTES).feed(BODIES.encode(stream, number, content))
    piece = BODIES.decode(message)
    assert (piece.stream, piece.number, piece.content) == (stream, number, content)


@given(st.binary(max_size=50))
def test_anything_else_is_refused(message: bytes) -> None:
    try:
        piece = BODIES.decode(message)
    except WireError:
        return
    assert FrameReader(MAX_PIECE_BYTES).feed(BODIES.encode(piece.stream, piece.number, piece.content))


def test_a_start_arrives() -> None:
    start = {"type": "http.response.start", "status": 418, "headers": [(b"a", b"\xff"), (b"a", b"")]}
    assert read_start(start_content(start)) == start


@pytest.mark.parametrize("content", [b"", b"data: x\n\n", b"\x92\xc8", b"\x92\xa3two\x90"])
def test_what_is_no_start_is_refused(content: bytes) -> None:
    with pytest.raises(WireError, match="malformed start"):
        read_start(content)


@given(channels, st.integers(0, 10**18 - 1))
def test_a_request_names_its_stream(channel: bytes, stream: int) -> None:
    assert read_reply_to(reply_to_text(ReplyTo(channel, stream))) == ReplyTo(channel, stream)


@pytest.mark.parametrize(
    "text",
    [b"", b"-", b"0" * 32, b"0" * 32 + b"-", b"0" * 31 + b"-1", b"g" * 32 + b"-1", b"0" * 32 + b"-1 "],
)
def test_another_header_names_none(text: bytes) -> None:
    assert read_reply_to(text) is None
