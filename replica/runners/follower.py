"""`python -m replica.runners.follower FD`: a rank other than 0, started by rank 0 and gone when that is.

Orders come on standard input, answers go to the file descriptor FD. When standard input ends, so has whoever
wrote to it: then this process ends at once, wherever it is, since it may wait for ranks that are gone. One
that was stopped is woken for that. A rank that cannot go on says why, and ends at once too: over gloo that is
how the others, which may wait for it, notice.
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
from typing import BinaryIO, TypeVar

import torch

from cache.errors import ServingError
from replica.errors import CollectiveFailed, EngineBroken
from replica.models.model_source import described, resolve
from replica.parallel import orders
from replica.parallel.orders import (
    AllocatePages,
    Answer,
    Close,
    Failed,
    Load,
    Loaded,
    Meet,
    Order,
    Refused,
    Room,
    Step,
)
from replica.parallel.rank_group import RankGroup
from replica.runners import load_choices, rank_model
from replica.runners.model_runner import ModelRunner

logger = logging.getLogger(__name__)

FAILED = 1  # its exit code where it could not go on
_PR_SET_PDEATHSIG = 1  # Linux, prctl(2)
_Order = TypeVar("_Order", bound=Order)


class Orders:
    """What rank 0 says, in order. Ends the process when rank 0 has gone."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._queue: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._are_over = threading.Event()
        threading.Thread(target=self._read, name="warmpath-orders", daemon=True).start()

    def next(self) -> Order:
        """Waits for it, for as long as rank 0 lives."""
        return self._queue.get()

    @property
    def are_over(self) -> bool:
        """Whether it has said Close, which `next` may not have come to yet."""
        return self._are_over.is_set()

    def wait_for_end(self) -> None:
        """Until `are_over`, for as long as rank 0 lives."""
        self._are_over.wait()

    def _read(self) -> None:
        while (order := orders.read(self._stream, orders.orders)) is not None:
            if isinstance(order, Close):
                self._are_over.set()
            self._queue.put(order)
            if isinstance(order, Close):
                return
        os._exit(0)


class Follower:
    """One rank's life: load, meet the others, allocate, then step after step until it is told to close."""

    def __init__(self, said: Orders, answers: BinaryIO) -> None:
        self._orders = said
        self._answers = answers
        self._group: RankGroup | None = None

    def run(self) -> None:
        """Raises what this rank cannot go on after, once rank 0 knows: then the process is to end at once."""
        order = self._orders.next()
        assert isinstance(order, Load)
        try:
            self._serve(order)
        except Exception as error:
            if not self._is_due_to_others(error):
                self._tell_why(error)
                raise
            logger.warning("this rank ends after what it takes for another's failure: %s", described(error))
        self._leave()  # whatever rank 0 does: others may wait for this one in a collective
        self._orders.wait_for_end()

    def _is_due_to_others(self, error: Exception) -> bool:
        """Whether rank 0 has said Close, or another rank has left the group, or not come to meet the others:
        then the cause lies there."""
        return self._orders.are_over or CollectiveFailed.behind(error) is not None

    def _tell_why(self, error: Exception) -> None:
        if isinstance(error, ServingError):
            self._answer(Refused(str(error)))
            return
        logger.critical("this rank of the model has failed", exc_info=error)
        self._answer(Failed(described(error)))

    def _serve(self, order: Load) -> None:
        config = order.config
        if config.torch_threads is not None:
            torch.set_num_threads(config.torch_threads)
        device = torch.device("cuda", order.rank) if config.device == "cuda" else torch.device("cpu")
        dtype: torch.dtype = getattr(torch, order.dtype)
        resolved = resolve(config.model, config.revision)
        with load_choices.refusals(resolved.source, device):
            if device.type == "cuda":  # before rank 0 waits for this one in a collective
                rank_model.check_device(resolved, order.part_bytes, device, config.tensor_parallel)
            model = rank_model.load_whole(resolved, dtype)
            self._answer(Loaded())
            self._next(Meet)  # whoever loads for long is waited for by rank 0 alone, which says who it is
            self._group = group = RankGroup(
                order.rank, config.tensor_parallel, device, Path(order.store), config.warm_up_time_limit_s
            )
            layers = rank_model.cut(model, resolved.source, group, device, order.max_model_len)
            runner = ModelRunner.with_pages(
                model, layers, config, resolved.source, max_model_len=order.max_model_len, agree=self._agree
            )
            while isinstance(step := self._orders.next(), Step):
                runner.follow(orders.scheduled(step))
            runner.close()

    def _agree(self, num_blocks: int) -> int:
        """Rank 0 knows what every rank has room for."""
        self._answer(Room(num_blocks))
        return self._next(AllocatePages).num_blocks

    def _next(self, kind: type[_Order]) -> _Order:
        """What rank 0 says next; Close in its place where a rank cannot load, or has no room."""
        order = self._orders.next()
        if not isinstance(order, kind):
            raise EngineBroken("rank 0 has ended what it began")
        return order

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()

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
        except Exception:  # rank 0 has been told, if it is there
            logging.shutdown()
            # At once: others may wait for it, and Python cannot end while a thread reads standard input.
            os._exit(FAILED)


if __name__ == "__main__":
    main()
