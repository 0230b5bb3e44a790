"""`python -m replica.runners.follower FD`: a rank other than 0, started by rank 0 and gone when that is.

Orders come on standard input, answers go to the file descriptor FD. When standard input ends, so has whoever
wrote to it: then this process ends at once, wherever it is, since it may wait for ranks that are gone. One
that was stopped is woken for that.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import torch

from cache.errors import ServingError
from replica.models.model_source import resolve
from replica.parallel import orders
from replica.parallel.orders import AllocatePages, Answer, Close, Load, Loaded, Order, Refused, Room, Step
from replica.parallel.rank_group import RankGroup
from replica.runners import rank_model
from replica.runners.model_runner import ModelRunner

logger = logging.getLogger(__name__)

FAILED = 1  # its exit code where it raised
_PR_SET_PDEATHSIG = 1  # Linux, prctl(2)


class Orders:
    """What rank 0 says, in order. Ends the process when rank 0 has gone."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._queue: queue.SimpleQueue[Order] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="warmpath-orders", daemon=True).start()

    def next(self) -> Order:
        """Waits for it, for as long as rank 0 lives."""
        return self._queue.get()

    def _read(self) -> None:
        while (order := orders.read(self._stream, orders.orders)) is not None:
            self._queue.put(order)
            if isinstance(order, Close):
                return
        os._exit(0)


class Follower:
    """One rank's life: load, meet the others, allocate, then step after step until it is told to close."""

    def __init__(self, said: Orders, answers: BinaryIO) -> None:
        self._orders = said
        self._answers = answers

    def run(self) -> None:
        """Raises whatever a step raises: then this process is to end, and rank 0 sees it."""
        order = self._orders.next()
        assert isinstance(order, Load)
        try:
            self._serve(order)
        except ServingError as error:
            self._answer(Refused(str(error)))
            while not isinstance(self._orders.next(), Close):
                pass

    def _serve(self, order: Load) -> None:
        config = order.config
        if config.torch_threads is not None:
            torch.set_num_threads(config.torch_threads)
        device = torch.device("cuda", order.rank) if config.device == "cuda" else torch.device("cpu")
        dtype: torch.dtype = getattr(torch, order.dtype)
        resolved = resolve(config.model, config.revision)
        if device.type == "cuda":  # before rank 0 waits for this one in a collective
            rank_model.check_device(resolved, order.part_bytes, device, config.tensor_parallel)
        model = rank_model.load_whole(resolved, dtype)
        self._answer(Loaded())
        group = RankGroup(
            order.rank, config.tensor_parallel, device, Path(order.store), config.warm_up_time_limit_s
        )
        try:
            layers = rank_model.cut(model, resolved.source, group, device, order.max_model_len)
            runner = ModelRunner.with_pages(
                model, layers, config, resolved.source, max_model_len=order.max_model_len, agree=self._agree
            )
            while isinstance(step := self._orders.next(), Step):
                runner.follow(orders.scheduled(step))
            runner.close()
        finally:
            group.close()

    def _agree(self, num_blocks: int) -> int:
        """Rank 0 knows what every rank has room for."""
        self._answer(Room(num_blocks))
        order = self._orders.next()
        if not isinstance(order, AllocatePages):
            raise SystemExit  # another rank has no room for what it needs
        return order.num_blocks

    def _answer(self, answer: Answer) -> None:
        self._answers.write(orders.framed(answer))
        self._answers.flush()


def wake_at_the_end_of_rank_0() -> None:
    """A stopped process reads nothing, not even that its standard input has ended: it would be left for good.

    Linux alone, which does this also when the thread that started this process ends: no harm.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def main() -> None:
    wake_at_the_end_of_rank_0()
    from transformers.utils.logging import disable_progress_bar

    logging.basicConfig(level=logging.WARNING)
    disable_progress_bar()  # rank 0 shows one
    with os.fdopen(int(sys.argv[1]), "wb") as answers:
        try:
            Follower(Orders(sys.stdin.buffer), answers).run()
        except Exception:
            logger.critical("this rank of the model has failed", exc_info=True)
            logging.shutdown()
            # At once: rank 0 asks who has gone, and Python cannot end while a thread reads standard input.
            os._exit(FAILED)


if __name__ == "__main__":
    main()
