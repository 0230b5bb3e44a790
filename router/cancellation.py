"""Whose a cancellation is: the running task's own, or that of something it waited for.

Both are one exception in asyncio. A task that is cancelled has nobody left to answer. Where somebody else has
ended what it waited for (a call whose channel was closed, a thread's work that will not be done), it has
failed, and whoever asked is still there. Knows tasks alone.
"""

from __future__ import annotations

import asyncio


def is_own() -> bool:
    """Whether the running task is being cancelled. Ask where a CancelledError has come up."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
