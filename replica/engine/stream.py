"""One request's way back from the engine thread to the coroutine that waits for it.

The engine thread never waits for a consumer: it hands over to the event loop, where what a slow one has
not read yet piles up and is given to it in one piece. Knows deltas and event loops; knows no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cache.errors import ServingError
from cache.messages import Delta, Logprobs


class DeltaStream:
    """Event-loop thread only, but for `loop`, which the engine thread reads to hand over."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_answers: int = 1) -> None:
        """num_answers: it ends when so many have ended, or with an error."""
        self.loop = loop
        self._num_left = num_answers
        self._unread: list[Delta] = []
        self._error: ServingError | None = None
        self._arrived = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether the engine has said its last word; nothing is left to cancel then."""
        return self._error is not None or not self._num_left

    @property
    def is_read(self) -> bool:
        """Whether every answer has been read to its end."""
        return not self._num_left and not self._unread

    def receive(self, item: Delta | ServingError) -> None:
        """Called on the loop with what the engine thread handed over."""
        if isinstance(item, ServingError):
            self._error = item
        else:
            self._unread.append(item)
            self._num_left -= item.finish_reason is not None
        self._arrived.set()

    async def next(self) -> Delta:
        """All that has arrived since the last call, as one delta; waits for something.

        Of several answers, what has arrived of one: the one whose turn is longest due.
        Raises the error the request ended with, after what came before it.
        """
        await self._arrived.wait()
        if self._unread:
            choice = self._unread[0].choice
            merged = merge([delta for delta in self._unread if delta.choice == choice])
            self._unread = [delta for delta in self._unread if delta.choice != choice]
            if not self._unread and not self.is_over:
                self._arrived.clear()
            return merged
        assert self._error is not None, "read past the end of a stream"
        raise self._error


def merge(deltas: Sequence[Delta]) -> Delta:
    """One delta that says what these say, in order. At least one, all of one answer; only the last may be
    final."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        cached_tokens=last.cached_tokens,
        finish_reason=last.finish_reason,
        choice=last.choice,
        logprobs=Logprobs.joined([delta.logprobs for delta in deltas if delta.logprobs is not None]),
        prompt_logprobs=deltas[0].prompt_logprobs,
    )


Parcel = list[tuple[DeltaStream, Delta | ServingError]]


def deliver(parcel: Parcel) -> None:
    """Hand everything in a parcel to its stream. On the loop that all of them belong to."""
    for stream, item in parcel:
        stream.receive(item)
