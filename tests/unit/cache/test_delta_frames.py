"""The delta channel's bytes: what goes out comes in, however it is cut; nothing else does."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache import delta_frames
from cache.channel.frames import (
    CHANNEL_BYTES,
    FORMAT_VERSION,
    Flow,
    FrameReader,
    Hello,
    flow,
    hello,
    read_flow,
    read_hello,
    read_welcome,
    welcome,
)
from cache.delta_frames import piece, read_piece
from cache.errors import WireError
from cache.messages import Delta, FinishReason, Logprobs

deltas = st.builds(
    Delta,
    text=st.text(st.characters(exclude_categories=["Cs"])),
    token_ids=st.lists(st.integers(0, 2**31 - 1)).map(tuple),
    cached_tokens=st.integers(0, 2**31),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    choice=st.integers(0, 15),
)


def messages_of(received: bytes, max_bytes: int = 1 << 20) -> list[bytes]:
    return list(FrameReader(max_bytes).feed(received))


@given(st.lists(deltas, max_size=6), st.data())
def test_pieces_come_in_as_they_went_out_wherever_they_are_cut(
    sent: list[Delta], data: st.DataObject
) -> None:
    wire = b"".join(piece(7, number, delta) for number, delta in enumerate(sent))
    reader, pieces, begin = FrameReader(1 << 20), [], 0
    while begin < len(wire):
        end = data.draw(st.integers(begin + 1, len(wire)))
        pieces += [read_piece(message) for message in reader.feed(wire[begin:end])]
        begin = end
    assert [one.content for one in pieces] == sent
    assert [(one.stream, one.number) for one in pieces] == [(7, number) for number in range(len(sent))]


@given(st.binary(max_size=200))
def test_noise_is_refused_and_nothing_else_is_raised(noise: bytes) -> None:
    for read in (read_piece, read_flow, read_hello, read_welcome):
        try:
            read(noise)
        except WireError:
            continue
        assert read is read_flow or read is read_welcome or read is read_piece  # it happened to be one
    reader = FrameReader(64)
    try:
        list(reader.feed(noise))
    except WireError:
        pass


def test_a_large_message_is_put_together_once() -> None:
    """Copying what is there with each part of it would take as long as the square of its size."""
    wire = piece(0, 0, Delta("x" * 1_000_000, (1,), 0)) + piece(0, 1, Delta("y", (2,), 0))
    reader, pieces = FrameReader(2_000_000), []
    for begin in range(0, len(wire), 1000):
        pieces += [read_piece(message) for message in reader.feed(wire[begin : begin + 1000])]
    assert [one.token_ids for one in pieces] == [(1,), (2,)]
    assert len(pieces[0].text) == 1_000_000


def test_greetings_and_flow() -> None:
    channel = bytes(range(CHANNEL_BYTES))
    (message,) = messages_of(hello(channel))
    assert read_hello(message) == channel
    (message,) = messages_of(welcome())
    read_welcome(message)
    (message,) = messages_of(flow(3, is_paused=True))
    assert read_flow(message) == Flow(3, True)


def test_another_version_is_named() -> None:
    other = msgspec.msgpack.encode(Hello(FORMAT_VERSION + 1, bytes(CHANNEL_BYTES)))
    with pytest.raises(WireError, match=f"format version {FORMAT_VERSION + 1}, not {FORMAT_VERSION}"):
        read_hello(other)


@pytest.mark.parametrize("length", [0, CHANNEL_BYTES - 1, CHANNEL_BYTES + 1])
def test_a_channel_has_all_its_bytes(length: int) -> None:
    with pytest.raises(WireError, match="malformed"):
        read_hello(msgspec.msgpack.encode(Hello(FORMAT_VERSION, bytes(length))))


def test_a_message_too_large_is_refused_by_its_length_alone() -> None:
    reader = FrameReader(100)
    with pytest.raises(WireError, match="101 bytes, at most 100"):
        list(reader.feed((101).to_bytes(4, "little")))


def test_a_piece_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_frames, "MAX_PIECE_BYTES", 100)
    with pytest.raises(WireError, match="piece of"):
        piece(0, 0, Delta("x" * 100, (), 0))


def test_logprobs_do_not_travel_here() -> None:
    logprobs = Logprobs(0, array("f", [-1.0]), array("i"), array("f"))
    with pytest.raises(WireError, match="logprobs"):
        piece(0, 0, Delta("x", (1,), 0, logprobs=logprobs))


@pytest.mark.parametrize("wrong", [("x", 0), (0, -1)])
def test_numbers_are_not_negative_and_not_text(wrong: tuple[object, object]) -> None:
    with pytest.raises(WireError, match="malformed piece"):
        read_piece(msgspec.msgpack.encode([*wrong, "", [], 0, None, 0]))
