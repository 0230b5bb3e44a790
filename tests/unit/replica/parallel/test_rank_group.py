"""Where the ranks of a model meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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
