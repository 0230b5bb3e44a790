"""How long the next delta is awaited: past the deadline no longer than an engine has to say so itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest

from cache.errors import DeadlineExceeded
from cache.messages import Delta
from router.dispatch import deadline
from router.dispatch.deadline import until_deadline

A, B = Delta("a", (1,), 0), Delta("b", (2,), 0)


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "GRACE_S", 0.0)


class Source:
    """Yields deltas at once, then nothing."""

    def __init__(self, *deltas: Delta, on_end: Callable[[], object] = lambda: None) -> None:
        self.is_closed = False
        self._deltas, self._on_end = deltas, on_end

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        try:
            for delta in self._deltas:
                yield delta
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self._on_end()
            raise
        finally:
            self.is_closed = True


@pytest.mark.parametrize("before", [(), (A, B)])
async def test_what_says_nothing_more_is_ended_and_closed(before: tuple[Delta, ...]) -> None:
    source, got = Source(*before), list[Delta]()

    async def read() -> None:
        async for delta in until_deadline(source.deltas(), 0.01):
            got.append(delta)

    with pytest.raises(DeadlineExceeded) as caught:
        await read()
    assert tuple(got) == before
    assert source.is_closed
    assert caught.value.deadline_s == 0.01
    assert caught.value.waited_s >= 0.01
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_without_a_deadline_nothing_is_between() -> None:
    deltas = Source(A).deltas()
    assert until_deadline(deltas, None) is deltas
    await deltas.aclose()


async def test_a_cancellation_from_outside_is_never_hidden() -> None:
    """It comes while the wait is being ended."""

    async def read() -> None:
        task = asyncio.current_task()
        assert task is not None
        async with aclosing(until_deadline(Source(on_end=task.cancel).deltas(), 0.0)) as deltas:
            await anext(deltas)

    task = asyncio.create_task(read())
    done, _ = await asyncio.wait([task], timeout=20)
    assert done
    assert task.cancelled()
    assert task.cancelling() == 1


async def test_an_error_at_the_end_of_a_wait_is_what_is_told() -> None:
    def fail() -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await anext(until_deadline(Source(on_end=fail).deltas(), 0.0))


async def test_who_reads_slowly_is_not_interrupted_and_gets_what_is_there() -> None:
    source = Source(A, B)
    async with asyncio.timeout(20), aclosing(until_deadline(source.deltas(), 0.0)) as deltas:
        assert await anext(deltas) is A
        await asyncio.sleep(0.02)  # time is up meanwhile
        assert await anext(deltas) is B
        await asyncio.sleep(0.02)
        with pytest.raises(DeadlineExceeded):
            await anext(deltas)


async def test_another_task_may_go_on_with_it() -> None:
    """As the one that sends does, after another has waited for the first delta."""
    async with aclosing(until_deadline(Source(A).deltas(), 0.01)) as deltas:
        assert await asyncio.create_task(_next(deltas)) is A
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(_next(deltas), 20)


async def _next(deltas: AsyncGenerator[Delta, None]) -> Delta:
    return await anext(deltas)


async def test_its_timer_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline may be a day, and a timer keeps what it belongs to."""
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    later = loop.call_later

    def call_later(delay: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        timers.append(later(delay, callback))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", call_later)
    async with aclosing(until_deadline(Source(A, B).deltas(), 86400.0)) as deltas:
        assert [await anext(deltas), await anext(deltas)] == [A, B]
    assert [timer.cancelled() for timer in timers] == [True]
