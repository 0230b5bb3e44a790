"""Rank 0's hold on the processes that compute a model's other parts: started, told, heard, watched, ended.

    a follower: standard input <- orders    a pipe of its own -> answers    a thread here waits for its end

A follower ends when its standard input does: however this process ends, none is left. One that ends before it
is told to has lost its part of every sequence: `on_lost` is called, once. Knows processes and frames; knows
neither torch nor models.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

from replica.errors import RankLost
from replica.parallel import orders
from replica.parallel.orders import Answer, Close, Order

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0  # for a follower to end by itself when it is told to
FIND_CAUSE_S = 2.0  # from a collective that failed to the news that somebody has gone


class Followers:
    """Ranks 1 to `size` - 1, on this host. Told and heard from one thread at a time; `close` from any."""

    def __init__(self, size: int, *, shared_fd: int, on_lost: Callable[[], None]) -> None:
        """Starts them; they wait for orders.

        shared_fd: a file descriptor that they get under the same number.
        on_lost: called on another thread, once the cause is logged.
        """
        self._on_lost = on_lost
        self._lock = threading.Lock()  # guards `_lost` and `_is_closing`
        self._lost: RankLost | None = None
        self._is_closing = False
        self._is_lost = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._answers: list[BinaryIO] = []
        for rank in range(1, size):
            process, answers = _start(shared_fd)
            self._processes.append(process)
            self._answers.append(answers)
            threading.Thread(
                target=self._watch, args=(rank, process), name=f"warmpath-rank-{rank}", daemon=True
            ).start()

    @property
    def pids(self) -> list[int]:
        """By rank, from 1 on."""
        return [process.pid for process in self._processes]

    def tell(self, order: Order) -> None:
        """The same order to all of them. Raises RankLost."""
        self._write([orders.framed(order)] * len(self._processes))

    def tell_each(self, order_of: Callable[[int], Order]) -> None:
        """order_of: by rank, from 1 on. Raises RankLost."""
        self._write([orders.framed(order_of(rank)) for rank in range(1, len(self._processes) + 1)])

    def hear_each(self) -> list[Answer]:
        """One answer of each, by rank from 1 on; waits for them. Raises RankLost."""
        heard = [orders.read(stream, orders.answers) for stream in self._answers]
        answers = [answer for answer in heard if answer is not None]
        if len(answers) < len(heard):
            raise self._cause(FIND_CAUSE_S)
        return answers

    def cause_of(self, error: Exception) -> Exception:
        """What to raise where a step failed with `error`: the rank that was lost, if that is why."""
        lost = self.lost(FIND_CAUSE_S)
        return error if lost is None else lost

    def lost(self, wait_s: float = 0.0) -> RankLost | None:
        """The first rank that ended before its time, if one does within so long."""
        self._is_lost.wait(wait_s)
        return self._lost

    def expect_end(self) -> None:
        """From now on nobody is lost who ends. Idempotent."""
        with self._lock:
            self._is_closing = True

    def tell_end(self) -> None:
        """Tell them to end, and wait for none. Idempotent."""
        self.expect_end()
        frame = orders.framed(Close())
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError, ValueError):  # it has gone, or was told before
                process.stdin.write(frame)
                process.stdin.close()

    def close(self) -> None:
        """End them: those that do not within CLOSE_TIMEOUT_S are killed. Idempotent."""
        self.tell_end()
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for stream in self._answers:
            stream.close()

    def _write(self, frames: list[bytes]) -> None:
        try:
            for process, frame in zip(self._processes, frames, strict=True):
                assert process.stdin is not None
                process.stdin.write(frame)
                process.stdin.flush()
        except OSError as error:
            raise self._cause(FIND_CAUSE_S) from error

    def _cause(self, wait_s: float) -> RankLost:
        lost = self.lost(wait_s)
        assert lost is not None, "a follower's pipe has ended, and the follower has not"
        return lost

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self._lock:
            if self._is_closing or self._lost is not None:
                return
            self._lost = RankLost(rank, code)
        logger.critical(
            "a rank of the model has gone, and with it its part of every sequence",
            extra={"rank": rank, "exit_code": code},
        )
        self._on_lost()
        self._is_lost.set()  # last: where that ended the process, nobody else tells of it


def _start(shared_fd: int) -> tuple[subprocess.Popen[bytes], BinaryIO]:
    """A follower and what it answers. It inherits everything else: devices, threads, where its log goes."""
    read_fd, write_fd = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "replica.runners.follower", str(write_fd)],
            stdin=subprocess.PIPE,
            pass_fds=(write_fd, shared_fd),
            # What can be imported here can be there: Serve puts code on the path that no variable names.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,  # Ctrl-C is for rank 0, which ends it
        )
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    return process, os.fdopen(read_fd, "rb")
