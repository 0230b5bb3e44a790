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

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._unread: list[Delta] = []
        self._error: ServingError | None = None
        self._arrived = asyncio.Event()
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether the engine has said its last word; nothing is left to cancel then."""
        return self._is_over

    def receive(self, item: Delta | ServingError) -> None:
        """Called on the loop with what the engine thread handed over."""
        if isinstance(item, ServingError):
            self._error = item
        else:
            self._unread.append(item)
        self._is_over = self._error is not None or self._unread[-1].finish_reason is not None
        self._arrived.set()

    async def next(self) -> Delta:
        """All that has arrived since the last call, as one delta; waits for something.

        Raises the error the request ended with, after what came before it.
        """
        await self._arrived.wait()
        if self._unread:
            merged = merge(self._unread)
            self._unread.clear()
            if self._error is None and merged.finish_reason is None:
                self._arrived.clear()
            return merged
        assert self._error is not None, "read past the end of a stream"
        raise self._error


def merge(deltas: Sequence[Delta]) -> Delta:
    """One delta that says what these say, in order. At least one; only the last may be final."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        cached_tokens=last.cached_tokens,
        finish_reason=last.finish_reason,
        logprobs=Logprobs.joined([delta.logprobs for delta in deltas if delta.logprobs is not None]),
        prompt_logprobs=deltas[0].prompt_logprobs,
    )


Parcel = list[tuple[DeltaStream, Delta | ServingError]]


def deliver(parcel: Parcel) -> None:
    """Hand everything in a parcel to its stream. On the loop that all of them belong to."""
    for stream, item in parcel:
        stream.receive(item)
