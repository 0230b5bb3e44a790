"""CPUs where a file says none: what the application and Serve ask Ray for."""

from __future__ import annotations

import pytest
from ray.serve._private.config import ReplicaConfig  # seen in ray 2.60

from deploy import app
from deploy.cpus import ROUTER_CPUS, cpus_each


def test_a_router_asks_for_what_is_counted() -> None:
    options = app.Router.ray_actor_options
    assert options is not None
    assert options["num_cpus"] == ROUTER_CPUS == cpus_each("Router", {})


@pytest.mark.parametrize("actor", [{}, {"num_cpus": None}, {"num_cpus": 0}, {"num_cpus": 0.1}])
def test_options_that_say_none_are_counted_as_serve_has_them(actor: dict[str, float | None]) -> None:
    """They replace the application's, and with them its CPUs."""
    asked = ReplicaConfig.create(object, ray_actor_options=dict(actor)).ray_actor_options["num_cpus"]
    assert cpus_each("Replica", {"ray_actor_options": actor}) == asked
