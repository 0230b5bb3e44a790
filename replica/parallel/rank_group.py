"""The processes that compute one model together, and what they tell each other inside a forward.

One group a process, torch.distributed's default one: NCCL between cards, gloo between CPUs, on this host
alone (they find each other through a file; both listen on the loopback interface). Knows tensors and ranks;
knows neither models nor steps.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist

from replica.device_errors import is_of_device
from replica.errors import CollectiveFailed
from replica.models.model_source import first_line

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
LEAVE_TIMEOUT_S = 5.0  # for the other ranks to leave as well, where none can leave alone


class Ranks(Protocol):
    """This process's place among `size`. All make the same calls in the same order, and wait in each."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, the same to the last bit on each. May be computed in place."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """(..., n) of each rank side by side: (..., n * size), in the ranks' order."""


class RankGroup:
    """`Ranks` over torch.distributed. `close` leaves the group; a collective whose other ranks have gone, or
    that waits longer than `timeout_s`, raises CollectiveFailed (gloo), or ends the process (NCCL).

    What this process's own device raises there passes as it is: CUDA tells of a kernel's failure in whatever
    is called next."""

    def __init__(self, rank: int, size: int, device: torch.device, store: Path, timeout_s: float) -> None:
        """Blocks until every rank is here. Raises CollectiveFailed if that takes longer than `timeout_s`.

        store: an empty file, or none yet, the same for every rank.
        """
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        self._has_left = False
        self._backend = backend = "nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # NCCL takes any other interface first, and asks at the first collective: this stays.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={LOOPBACK}")
        with _on_loopback():
            try:
                dist.init_process_group(
                    backend,
                    init_method=f"file://{store}",
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(seconds=timeout_s),
                )
            except RuntimeError as error:
                self._fail(error)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            self._fail(error)
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            dist.all_gather(parts, tensor.contiguous())
        except RuntimeError as error:
            self._fail(error)
        return torch.cat(parts, dim=-1)

    def abort(self) -> None:
        """Let whoever waits here in a collective go on, to fail then or in the next one. From any thread; may
        take long.

        For where a rank has gone, which over gloo the others notice by themselves, and over NCCL may not.
        """
        if self._backend == "nccl" and (group := dist.group.WORLD) is not None:
            group.abort()

    def close(self) -> None:
        """Idempotent. Waits for nobody over gloo; over NCCL a few seconds for those who have not left either.

        NCCL's ranks on one host leave together, and one that waits for somebody who never comes does so for
        good: then what it holds is left to the end of the process.
        """
        if self._has_left or not dist.is_initialized():
            return
        self._has_left = True
        if self._backend != "nccl":
            dist.destroy_process_group()
            return
        leaving = threading.Thread(target=dist.destroy_process_group, name="warmpath-leave", daemon=True)
        leaving.start()
        leaving.join(LEAVE_TIMEOUT_S)

    def _fail(self, error: RuntimeError) -> NoReturn:
        """A collective did: for the others, unless it is this process's own device that says so."""
        if is_of_device(error):
            raise error
        raise CollectiveFailed(self.rank, first_line(error), self._timeout_s) from error


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Gloo takes the interface that the host's name stands for unless it is told one."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    try:
        yield
    finally:
        if before is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = before
