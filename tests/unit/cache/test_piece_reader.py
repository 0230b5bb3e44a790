"""One stream's pieces: in order or not at all, and never many of them."""

from __future__ import annotations

import asyncio

import pytest

from cache.channel.frames import ReplyTo
from cache.channel.reader import PAUSED_PIECES, PieceReader
from cache.delta_frames import DeltaPiece
from cache.errors import WireError
from cache.messages import Delta


class Source:
    def __init__(self) -> None:
        self.told: list[tuple[int, bool]] = []

    def flow(self, stream: int, *, is_paused: bool) -> None:
        self.told.append((stream, is_paused))


def piece(number: int) -> DeltaPiece:
    return DeltaPiece(5, number, f"t{number} ", (number,), 0, None, 0)


@pytest.fixture
def reader() -> PieceReader[Delta]:
    return PieceReader(ReplyTo(bytes(16), 5))


def test_pieces_are_read_in_order(reader: PieceReader[Delta]) -> None:
    source = Source()
    assert not reader.has_begun
    for number in range(3):
        reader.receive(piece(number), source)
    assert reader.has_begun
    assert [reader.take() for _ in range(3)] == [Delta(f"t{n} ", (n,), 0) for n in range(3)]
    assert not reader.has_pieces
    assert source.told == []


@pytest.mark.parametrize("number", [0, 2])
def test_a_piece_that_is_not_the_next_is_refused(reader: PieceReader[Delta], number: int) -> None:
    source = Source()
    reader.receive(piece(0), source)
    with pytest.raises(WireError, match=f"piece {number} of a stream whose next one is 1"):
        reader.receive(piece(number), source)
    assert [reader.take()] == [piece(0).content]
    assert not reader.has_pieces


@pytest.mark.parametrize("number", [0, 1])
def test_a_piece_from_elsewhere_ends_its_stream_alone(reader: PieceReader[Delta], number: int) -> None:
    """It closed that connection: all other streams of a replica that was well were lost with it."""
    reader.receive(piece(0), Source())
    reader.receive(piece(number), Source())
    assert reader.is_lost
    assert [reader.take()] == [piece(0).content]
    assert not reader.has_pieces


def test_who_reads_slowly_pauses_the_replica_until_all_is_read(reader: PieceReader[Delta]) -> None:
    source = Source()
    for number in range(PAUSED_PIECES + 2):  # some are under way when it is told
        reader.receive(piece(number), source)
    assert source.told == [(5, True)]
    while reader.has_pieces:
        assert source.told == [(5, True)]
        reader.take()
    assert source.told == [(5, True), (5, False)]
    reader.receive(piece(PAUSED_PIECES + 2), source)
    assert len(source.told) == 2


def test_nobody_is_told_to_go_on_through_a_lost_connection(reader: PieceReader[Delta]) -> None:
    source = Source()
    for number in range(PAUSED_PIECES):
        reader.receive(piece(number), source)
    reader.lose()
    for _ in range(PAUSED_PIECES):
        reader.take()
    assert source.told == [(5, True)]


async def test_news_is_a_piece_a_loss_or_a_wake(reader: PieceReader[Delta]) -> None:
    for tell in (lambda: reader.receive(piece(0), Source()), reader.lose, reader.wake):
        waiting = asyncio.create_task(reader.news())
        await asyncio.sleep(0)
        assert not waiting.done()
        tell()
        await asyncio.wait_for(waiting, 20)
