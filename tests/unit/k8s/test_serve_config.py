"""A Serve config inside a RayService is read as deploy.yaml is: its mistakes are named."""

from __future__ import annotations

import pytest

from tests.unit.k8s.breaks import Break, drop, found_in, in_places, serve

IN_DEMO: list[tuple[Break, str]] = [
    (lambda t: serve(t, "max_queued_requests", "max_queued_request"), "did you mean 'max_queued_requests'"),
    (lambda t: serve(t, "block_size: 16", "block_size: 0"), "block_size = 0: must be between"),
    (lambda t: serve(t, "num_blocks", "num_block"), "did you mean 'num_blocks'"),
    (lambda t: serve(t, "proxy_location: EveryNode", "proxy_location: ["), "serveConfigV2"),
    (lambda t: drop(t["RayService/warmpath"]["spec"], "serveConfigV2"), "serveConfigV2"),
    (
        lambda t: t["RayService/warmpath"]["spec"].update(serveConfigV2=""),
        "serveConfigV2: must be a mapping",
    ),
]


IN_HA: list[tuple[Break, str]] = [
    (lambda t: serve(t, "min_replicas: 2", "min_replicas: 0"), "min_replicas = 0: must be at least 1"),
    (lambda t: serve(t, "num_gpus: 1", "num_gpus: 2"), "num_gpus = 2: must be 1"),
    (lambda t: serve(t, "engine: 1", "engine: '1'"), "resources.engine = '1': must be a number"),
]


MISTAKES = in_places({"cpu-demo": IN_DEMO, "ha": IN_HA})


@pytest.mark.parametrize(("place", "change", "words"), MISTAKES)
def test_mistake_is_found(place: str, change: Break, words: str) -> None:
    told = found_in(place, change)
    assert any(words in each for each in told), told
