"""What an event loop runs, one by one, and something done between two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any


class Callbacks:
    """Of the running loop, tasks' steps among them, for as long as the test runs. Those that other threads
    ask for do not count."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._left = 0
        self._act: Callable[[], object] = lambda: None
        self._call_soon, self._call_at = loop.call_soon, loop.call_at
        loop.call_soon = self._soon  # type: ignore[method-assign]
        loop.call_at = self._at  # type: ignore[method-assign]

    def after(self, number: int, act: Callable[[], object]) -> None:
        """Do that behind so many more of them, in place of what was to be done before. To be called in one of
        them, which does not count."""
        self._left, self._act = number + 1, act

    def _soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self._call_soon(self._run, callback, args, context=context)

    def _at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self._call_at(when, self._run, callback, args, context=context)

    def _run(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        callback(*args)
        self._left -= 1
        if not self._left:
            self._act()
