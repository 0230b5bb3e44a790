"""Rank 0's hold on the processes that compute a model's other parts: started, told, heard, watched, ended.

    a follower: standard input <- orders    a pipe of its own -> answers, which a thread here reads to its end

A follower ends when its standard input does: however this process ends, none is left. One that ends before it
is told to, or says that it will, has lost its part of every sequence: `on_lost` is called, once. Knows
processes and frames; knows neither torch nor models.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import BinaryIO

from replica.errors import CollectiveFailed, RankLost, RankRefused, RankSilent
from replica.parallel import orders
from replica.parallel.orders import Answer, Close, Failed, Order, Refused

logger = logging.getLogger(__name__)

FOLLOWER = ("-m", "replica.runners.follower")
CLOSE_TIMEOUT_S = 5.0  # for a follower to end by itself when it is told to
FIND_CAUSE_S = 5.0  # from a collective that failed to the news that somebody has gone


class Followers:
    """Ranks 1 to `size` - 1, on this host. Told and heard from one thread at a time; `close` from any."""

    def __init__(self, size: int, *, shared_fd: int, on_lost: Callable[[RankLost], None]) -> None:
        """Starts them; they wait for orders.

        shared_fd: a file descriptor that they get under the same number.
        on_lost: called on another thread, once the cause is logged.
        """
        self._on_lost = on_lost
        self._news = threading.Condition()  # guards the next four; told of each answer and of a loss
        self._unheard: list[deque[Answer]] = [deque() for _ in range(1, size)]
        self._lost: RankLost | None = None
        self._has_lost = False  # set before `on_lost` is called, as `_lost` is after it
        self._is_closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, size):
            process, answers = _start(shared_fd)
            self._processes.append(process)
            threading.Thread(
                target=self._watch, args=(rank, process, answers), name=f"warmpath-rank-{rank}", daemon=True
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

    def hear_each(self, limit_s: float) -> list[Answer]:
        """One answer of each, by rank from 1 on; waits for them. Raises RankLost, and RankSilent for who has
        not answered within `limit_s`."""
        with self._news:
            self._news.wait_for(lambda: self._lost is not None or all(self._unheard), limit_s)
            if self._lost is not None:
                raise self._lost
            for rank, answers in enumerate(self._unheard, start=1):
                if not answers:
                    raise RankSilent(rank, limit_s)
            return [answers.popleft() for answers in self._unheard]

    def cause_of(self, error: Exception) -> Exception:
        """What to raise where rank 0 failed with `error`: the rank that was lost, the collective that failed.

        That fails where another rank has gone, before it is known here who that is: the news is waited for.
        """
        failed = CollectiveFailed.behind(error)
        lost = self.lost(0.0 if failed is None else FIND_CAUSE_S)
        return lost or failed or error

    def lost(self, wait_s: float = 0.0) -> RankLost | None:
        """The first rank that ended before its time, if one does within so long."""
        with self._news:
            self._news.wait_for(lambda: self._lost is not None, wait_s)
            return self._lost

    def expect_end(self) -> None:
        """From now on nobody is lost who ends. Idempotent."""
        with self._news:
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

    def _write(self, frames: list[bytes]) -> None:
        try:
            for process, frame in zip(self._processes, frames, strict=True):
                assert process.stdin is not None
                process.stdin.write(frame)
                process.stdin.flush()
        except OSError as error:
            lost = self.lost(FIND_CAUSE_S)
            assert lost is not None, "a follower's pipe has ended, and the follower has not"
            raise lost from error

    def _watch(self, rank: int, process: subprocess.Popen[bytes], stream: BinaryIO) -> None:
        with stream:
            while (answer := orders.read(stream, orders.answers)) is not None:
                match answer:
                    case Refused():
                        self._lose(RankRefused(rank, answer.reason))
                    case Failed():
                        self._lose(RankLost(rank, None, answer.reason))
                    case _:
                        self._hear(rank, answer)
        self._lose(RankLost(rank, process.wait()))

    def _hear(self, rank: int, answer: Answer) -> None:
        with self._news:
            self._unheard[rank - 1].append(answer)
            self._news.notify_all()

    def _lose(self, lost: RankLost) -> None:
        with self._news:
            if self._is_closing or self._has_lost:
                return
            self._has_lost = True
        why = {"exit_code": lost.exit_code} if lost.cause is None else {"reason": lost.cause}
        logger.critical(
            "a rank of the model has gone, and with it its part of every sequence",
            extra={"rank": lost.rank, **why},
        )
        self._on_lost(lost)
        with self._news:  # last: where that ended the process, nobody else tells of it
            self._lost = lost
            self._news.notify_all()


def _start(shared_fd: int) -> tuple[subprocess.Popen[bytes], BinaryIO]:
    """A follower and what it answers. It inherits everything else: devices, threads, where its log goes."""
    read_fd, write_fd = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, *FOLLOWER, str(write_fd)],
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
