"""A thread that looks at something again and again, until it is told to stop.

Knows threads; knows nothing of what it looks at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Poller:
    """Calls `look` every `interval_s` from `start` to `close`."""

    def __init__(self, name: str, interval_s: float, look: Callable[[], object]) -> None:
        """name: the thread's."""
        self._interval_s = interval_s
        self._look = look
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Look no more. May be called twice, before `start`, and by `look` itself."""
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._look()
