"""Whatever becomes of a delta channel, an answer is what the replica generated: nothing lost, nothing twice.

The real connection, reader and call, fed with bytes cut anywhere; between them and the replica pieces are
dropped, repeated and swapped, the connection is lost, the call ends too early, too late or with an error.
Whoever reads goes on from what it has, as the dispatcher does, until the answer is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from unittest import mock

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache.channel.connection import ChannelConnection
from cache.channel.frames import ReplyTo, hello, welcome
from cache.channel.reader import PieceReader
from cache.delta_frames import DELTAS, piece
from cache.errors import PiecesLost
from cache.messages import Delta, FinishReason
from router.deltas import delta_calls
from router.deltas.delta_calls import deltas_of

CHANNEL = bytes(16)
NUM_TOKENS = 12


class ReplicaDied(Exception):
    pass


class Fate(Enum):
    """What happens in place of the next piece's arrival."""

    ARRIVES = auto()
    DROPPED = auto()
    REPEATED = auto()
    SWAPPED = auto()  # with the one after it
    TURN = auto()  # the event loop gets a turn: whoever reads may catch up
    CUT = auto()  # the connection is lost; the replica tells by the call
    DIES = auto()  # the replica does
    ENDS_EARLY = auto()  # the call's end overtakes what is left
    MADE_ANEW = auto()  # Serve sends the call to another replica, which has no connection to this Router


@dataclass(frozen=True)
class Attempt:
    fates: Sequence[Fate]
    is_by_call: bool  # the replica has no connection to this Router
    cut: int  # bytes at a time


attempts = st.builds(
    Attempt,
    st.lists(
        st.one_of(st.just(Fate.ARRIVES), st.just(Fate.TURN), st.sampled_from(Fate)), max_size=2 * NUM_TOKENS
    ),
    st.booleans(),
    st.integers(1, 200),
)


class Transport(asyncio.Transport):
    """Takes what is written, and can be aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        pass

    def get_extra_info(self, name: str, default: object = None) -> object:
        return mock.Mock()


class Call:
    """What the replica says through Serve."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[Delta | Exception] = asyncio.Queue()

    def say(self, item: Delta | Exception) -> None:
        self._items.put_nowait(item)

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Delta:
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item


def delta(position: int) -> Delta:
    finish = FinishReason.LENGTH if position == NUM_TOKENS - 1 else None
    return Delta(f"t{position} ", (position,), 3, finish)


async def replica(
    attempt: Attempt, first: int, stream: int, connection: ChannelConnection[Delta], call: Call
) -> None:
    """Sends the tokens from `first` on, as far as fate lets it."""
    frames = [piece(stream, position - first, delta(position)) for position in range(first, NUM_TOKENS)]

    def arrive(*some: bytes) -> None:
        wire = b"".join(some)
        for begin in range(0, len(wire), attempt.cut):
            if connection.ended.done():
                return
            connection.data_received(wire[begin : begin + attempt.cut])

    fates = iter(attempt.fates)
    while frames:
        fate = next(fates, Fate.ARRIVES)
        if fate is Fate.ARRIVES:
            arrive(frames.pop(0))
        elif fate is Fate.DROPPED:
            frames.pop(0)
        elif fate is Fate.REPEATED:
            arrive(frames[0], frames[0])
            frames.pop(0)
        elif fate is Fate.SWAPPED:
            arrive(*reversed(frames[:2]))
            del frames[:2]
        elif fate is Fate.TURN:
            await asyncio.sleep(0)
        elif fate is Fate.CUT:
            connection.connection_lost(None)
        elif fate is Fate.DIES:
            connection.connection_lost(None)
            call.say(ReplicaDied())
            return
        elif fate is Fate.ENDS_EARLY:
            call.say(StopAsyncIteration())
            await asyncio.sleep(0)
        elif fate is Fate.MADE_ANEW:
            for position in range(first, NUM_TOKENS):
                call.say(delta(position))
            return
        if connection.ended.done():
            call.say(PiecesLost())  # what a replica says whose connection is gone
            return
    call.say(StopAsyncIteration())


async def answer(schedule: Sequence[Attempt]) -> tuple[list[Delta], int]:
    """All deltas read, over attempts; how many attempts it took."""
    read: list[Delta] = []
    readers: dict[int, PieceReader] = {}
    connection: ChannelConnection[Delta] | None = None
    for stream in range(len(schedule) + 1):
        attempt = schedule[stream] if stream < len(schedule) else Attempt((), False, 200)
        if connection is None or connection.ended.done():
            connection = ChannelConnection(DELTAS, CHANNEL, readers)
            transport = Transport()
            connection.connection_made(transport)
            assert transport.written == hello(CHANNEL)
            connection.data_received(welcome())
            assert connection.is_open
        reader, call = PieceReader(ReplyTo(CHANNEL, stream)), Call()
        readers[stream] = reader
        if attempt.is_by_call:
            for position in range(len(read), NUM_TOKENS):
                call.say(delta(position))
        else:
            sending = asyncio.create_task(replica(attempt, len(read), stream, connection, call))
        try:
            async with contextlib.aclosing(deltas_of(call, reader, lambda: None)) as deltas:
                async for one in deltas:
                    read.append(one)
                    if one.finish_reason is not None:
                        return read, stream + 1
            raise AssertionError("it ended without its last delta, and without an error")
        except (PiecesLost, ReplicaDied):
            continue
        finally:
            del readers[stream]
            if not attempt.is_by_call:
                await sending
    raise AssertionError("an attempt to which nothing happened did not succeed")


@settings(deadline=None)
@given(st.lists(attempts, max_size=4))
@example([Attempt([Fate.ARRIVES, Fate.MADE_ANEW], False, 200)])
def test_an_answer_is_what_was_generated_whatever_becomes_of_its_connection(schedule: list[Attempt]) -> None:
    with (
        mock.patch.object(delta_calls, "LATE_PIECE_LIMIT_S", 0.001),
        mock.patch.object(delta_calls, "LAST_WORDS_LIMIT_S", 0.001),
    ):
        read, _ = asyncio.run(answer(schedule))
    assert read == [delta(position) for position in range(NUM_TOKENS)]


@given(st.lists(st.sampled_from([Fate.ARRIVES, Fate.TURN]), max_size=20), st.integers(1, 100))
def test_nothing_is_given_up_while_nothing_is_wrong(fates: list[Fate], cut: int) -> None:
    read, num_attempts = asyncio.run(answer([Attempt(fates, False, cut)]))
    assert len(read) == NUM_TOKENS
    assert num_attempts == 1
