"""How ranks meet, and how one leaves its group, by torch's calls, which stand-ins answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError

from replica.device_errors import is_out_of_memory
from replica.errors import CollectiveFailed
from replica.parallel import rank_group
from replica.parallel.rank_group import RankGroup


@pytest.mark.parametrize(
    ("device", "variables", "during", "after"),
    [
        ("cpu", {}, {"GLOO_SOCKET_IFNAME": "lo"}, {}),
        ("cpu", {"GLOO_SOCKET_IFNAME": "eth0"}, {"GLOO_SOCKET_IFNAME": "lo"}, {"GLOO_SOCKET_IFNAME": "eth0"}),
        ("cuda", {}, {"NCCL_SOCKET_IFNAME": "=lo"}, {"NCCL_SOCKET_IFNAME": "=lo"}),
        (
            "cuda",
            {"NCCL_SOCKET_IFNAME": "eth0"},
            {"NCCL_SOCKET_IFNAME": "eth0"},
            {"NCCL_SOCKET_IFNAME": "eth0"},
        ),
    ],
)
def test_ranks_listen_where_this_host_alone_hears(
    device: str,
    variables: dict[str, str],
    during: dict[str, str],
    after: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL reads its variable when the first tensor is summed, gloo when the group is made."""
    begun: list[tuple[str, dict[str, str]]] = []

    def init_process_group(backend: str, **_: Any) -> None:
        begun.append((backend, dict(rank_group.os.environ)))

    environment = dict(variables)
    monkeypatch.setattr(rank_group, "LOOPBACK", "lo")
    monkeypatch.setattr(rank_group.os, "environ", environment)
    monkeypatch.setattr(rank_group.dist, "init_process_group", init_process_group)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    RankGroup(0, 2, torch.device(device, 0), tmp_path / "store", 1.0)
    [(backend, found)] = begun
    assert backend == {"cpu": "gloo", "cuda": "nccl"}[device]
    assert during.items() <= found.items()
    assert environment == after


class Distributed:
    """In the place of `torch.distributed`. Over NCCL nobody leaves before `others_leave` is set."""

    def __init__(self) -> None:
        self.backend = ""
        self.others_leave = threading.Event()
        self.is_left = threading.Event()
        self.num_calls = 0
        self.num_aborted = 0
        self.group = SimpleNamespace(WORLD=self)
        self.error: Exception = RuntimeError("Connection closed by peer\nsomewhere in C++")

    def all_reduce(self, _tensor: object) -> None:
        raise self.error

    def all_gather(self, _parts: object, _tensor: object) -> None:
        raise self.error

    def abort(self) -> None:
        self.num_aborted += 1

    def init_process_group(self, backend: str, **_: object) -> None:
        self.backend = backend

    def is_initialized(self) -> bool:
        return not self.is_left.is_set()

    def destroy_process_group(self) -> None:
        self.num_calls += 1
        if self.backend == "nccl":
            self.others_leave.wait()
        self.is_left.set()


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> Distributed:
    made = Distributed()
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=lo")  # and take it back: a group on cards sets it
    monkeypatch.setattr(rank_group, "dist", made)
    monkeypatch.setattr(rank_group, "LEAVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    return made


def group_on(device: str, folder: Path) -> RankGroup:
    return RankGroup(0, 2, torch.device(device), folder / "store", 1.0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_has_left_when_the_others_have(device: str, distributed: Distributed, tmp_path: Path) -> None:
    group = group_on(device, tmp_path)
    distributed.others_leave.set()
    group.close()
    assert distributed.is_left.is_set()
    group.close()
    assert distributed.num_calls == 1


def test_it_does_not_wait_for_good_for_one_that_never_leaves(
    distributed: Distributed, tmp_path: Path
) -> None:
    group, began_s = group_on("cuda", tmp_path), time.monotonic()
    group.close()
    group.close()
    assert time.monotonic() - began_s < 5
    assert not distributed.is_left.is_set()
    assert distributed.num_calls == 1
    distributed.others_leave.set()
    assert distributed.is_left.wait(5)


def test_a_collective_that_fails_is_told_as_that(distributed: Distributed, tmp_path: Path) -> None:
    """Who catches torch's RuntimeError takes it for the model's."""
    with pytest.raises(CollectiveFailed, match=r"^rank 0 .*warm_up_time_limit_s, 1 s: Connection .* peer$"):
        group_on("cpu", tmp_path).sum(torch.ones(1))


NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, {}, NCCL version 2.28.9\n{}"
UNHANDLED = "unhandled cuda error (run with NCCL_DEBUG=INFO for details)"
CALL_FAILED = "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure {}"
BY_COLLECTIVE = pytest.mark.parametrize("collective", [RankGroup.sum, RankGroup.gather])


@BY_COLLECTIVE
@pytest.mark.parametrize(
    ("own", "is_for_memory"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be"), False),
        (
            DistBackendError(NCCL.format(UNHANDLED, CALL_FAILED.format("700 'an illegal access'"))),
            False,
        ),
        (DistBackendError(NCCL.format(UNHANDLED, CALL_FAILED.format("2 'out of memory'"))), True),
        (DistBackendError(NCCL.format(UNHANDLED, CALL_FAILED.format("'out of memory'"))), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB."), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
    ],
    ids=str,
)
def test_what_its_own_device_fails_with_is_no_others_doing(
    own: Exception,
    is_for_memory: bool,
    collective: Callable[[RankGroup, torch.Tensor], object],
    distributed: Distributed,
    tmp_path: Path,
) -> None:
    """CUDA tells of a kernel's failure in whatever is called next. It was taken for a rank that had gone, and
    told to nobody; on rank 0 neither for a lost card nor for a lack of memory."""
    distributed.error = own
    with pytest.raises(RuntimeError) as caught:
        collective(group_on("cuda", tmp_path), torch.ones(1))
    assert caught.value is own
    assert is_out_of_memory(own) == is_for_memory


@BY_COLLECTIVE
def test_a_rank_that_nccl_misses_is_told_as_that(
    collective: Callable[[RankGroup, torch.Tensor], object], distributed: Distributed, tmp_path: Path
) -> None:
    why = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
    distributed.error = DistBackendError(
        NCCL.format("remote process exited or there was a network error", why)
    )
    with pytest.raises(CollectiveFailed, match="remote process exited"):
        collective(group_on("cuda", tmp_path), torch.ones(1))


@pytest.mark.parametrize(("device", "num_aborted"), [("cpu", 0), ("cuda", 1)])
def test_a_wait_is_ended_where_a_rank_that_has_gone_does_not(
    device: str, num_aborted: int, distributed: Distributed, tmp_path: Path
) -> None:
    group_on(device, tmp_path).abort()
    assert distributed.num_aborted == num_aborted


def test_over_gloo_nobody_is_waited_for(distributed: Distributed, tmp_path: Path) -> None:
    group_on("cpu", tmp_path).close()
    assert distributed.is_left.is_set()
