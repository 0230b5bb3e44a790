"""A stream of deltas, and the moment from which nobody waits for more of it.

An engine ends what is past its deadline by itself, between two steps. This is for one that says nothing: it
stands still, cannot be reached, or Serve has not found one that takes the call.
Knows deltas and tasks; knows no replicas. Owner: the router's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from types import TracebackType

from cache.errors import DeadlineExceeded
from cache.messages import Delta

GRACE_S = 1.0  # after the deadline: an engine's own word for it has so long to come


def until_deadline(
    deltas: AsyncGenerator[Delta, None], deadline_s: float | None
) -> AsyncGenerator[Delta, None]:
    """The same, none of which is awaited after `GRACE_S` past the deadline. Closing it closes them.

    deadline_s: seconds from now; None: there is none. What is there already comes also after it, to a client
    that reads slowly. Raises DeadlineExceeded, and what they raise.
    """
    return deltas if deadline_s is None else _awaited(deltas, deadline_s)


async def _awaited(deltas: AsyncGenerator[Delta, None], deadline_s: float) -> AsyncGenerator[Delta, None]:
    async with contextlib.aclosing(deltas):
        with contextlib.closing(_Patience(deadline_s)) as patience:
            while True:
                try:
                    with patience:
                        delta = await anext(deltas)
                except StopAsyncIteration:
                    return
                yield delta


class _Patience:
    """Ends one wait of several, as `asyncio.timeout` does: the one that is under way when time is up.

    It has one timer for all of them, they may be in different tasks, and between two it ends nothing: whoever
    takes the deltas is not interrupted at what it does with them.
    """

    def __init__(self, deadline_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_s = deadline_s
        self._began_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(deadline_s + GRACE_S, self._end)
        self._task: asyncio.Task[object] | None = None  # that waits
        self._cancelled_before = 0  # how often it had been cancelled when it began to
        self._has_ended = False  # its wait, by us

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelled_before = self._task.cancelling()
        if self._timer is None:  # it went off between two waits
            self._timer = self._loop.call_later(GRACE_S, self._end)

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if not self._has_ended:
            return
        self._has_ended = False
        assert task is not None
        is_ours_alone = task.uncancel() <= self._cancelled_before
        if is_ours_alone and kind is asyncio.CancelledError:
            raise DeadlineExceeded(self._deadline_s, self._loop.time() - self._began_at) from None

    def close(self) -> None:
        """End nothing any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        self._timer = None
        if self._task is not None:
            self._has_ended = True
            self._task.cancel()
