"""The edge to Ray without a cluster: which loop, and whose error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError

from cache.errors import ConfigError, QueueFull
from router.errors import AllBusy, NoReplica, ReplicaLost
from router.ingress import check_one_loop, place_among_routers, translate


@pytest.mark.parametrize(
    ("environment", "is_accepted"),
    [
        ({"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}, True),
        ({"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}, True),
        ({}, False),
        ({"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1"}, False),
        ({"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1"}, False),
    ],
)
def test_it_refuses_to_run_on_two_event_loops(environment: dict[str, str], is_accepted: bool) -> None:
    if is_accepted:
        check_one_loop(environment)
    else:
        with pytest.raises(ConfigError, match="RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"):
            check_one_loop(environment)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ActorDiedError(), ReplicaLost),
        (ActorUnavailableError("gone", None), ReplicaLost),
        (RequestCancelledError("r"), ReplicaLost),
        (BackPressureError(1, 1), AllBusy),
        (DeploymentUnavailableError("d"), NoReplica),
        (NoReplica(), NoReplica),
        (ValueError("x"), ValueError),
    ],
)
def test_rays_errors_become_ours(error: Exception, kind: type[Exception]) -> None:
    assert type(translate(error)) is kind


@pytest.mark.parametrize("cause", [QueueFull(3, 4), ValueError("x")])
def test_what_a_replica_raised_is_unwrapped(cause: Exception) -> None:
    wrapped = RayTaskError("generate", "trace", cause).as_instanceof_cause()
    assert translate(wrapped) is cause


def test_a_router_outside_serve_has_no_peers() -> None:
    assert place_among_routers() == (0, 1)


@pytest.mark.parametrize(("rank", "world_size", "place"), [(1, 4, (1, 4)), (3, 2, (1, 2)), (0, 0, (0, 1))])
def test_serve_tells_a_router_its_place(
    monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int, place: tuple[int, int]
) -> None:
    context = SimpleNamespace(rank=SimpleNamespace(rank=rank), world_size=world_size)
    monkeypatch.setattr("router.ingress.serve.get_replica_context", lambda: context)
    assert place_among_routers() == place
