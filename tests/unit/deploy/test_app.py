"""What a replica settles on the node it landed on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deploy import app
from replica.config import ReplicaConfig


@pytest.mark.parametrize(
    ("num_replicas", "num_nodes", "threads"),
    [(1, 1, 8), (2, 1, 4), (3, 2, 4), (0, 1, 8), (0, 3, 8)],  # 0: as Serve says where replicas scale
)
def test_cores_and_memory_are_divided_by_the_replicas_of_a_node(
    num_replicas: int, num_nodes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.ray, "nodes", lambda: [{"Alive": True}] * num_nodes + [{"Alive": False}])
    context = SimpleNamespace(world_size=num_replicas)
    monkeypatch.setattr(app.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(app.os, "sched_getaffinity", lambda _pid: range(8))
    config = app._on_node(ReplicaConfig(device="cpu", kv_memory_fraction=0.8))
    assert config.torch_threads == threads
    assert config.kv_memory_fraction == pytest.approx(0.8 * threads / 8)
