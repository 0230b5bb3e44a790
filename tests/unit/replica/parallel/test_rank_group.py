"""How a rank leaves its group, by torch's calls, which stand-ins answer."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from replica.parallel import rank_group
from replica.parallel.rank_group import RankGroup


class Distributed:
    """In the place of `torch.distributed`. Over NCCL nobody leaves before `others_leave` is set."""

    def __init__(self) -> None:
        self.backend = ""
        self.others_leave = threading.Event()
        self.is_left = threading.Event()
        self.num_calls = 0

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
    monkeypatch.setattr(rank_group, "dist", made)
    monkeypatch.setattr(rank_group, "LEAVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(rank_group, "torch", SimpleNamespace(cuda=SimpleNamespace(set_device=lambda _: None)))
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


def test_over_gloo_nobody_is_waited_for(distributed: Distributed, tmp_path: Path) -> None:
    group_on("cpu", tmp_path).close()
    assert distributed.is_left.is_set()
