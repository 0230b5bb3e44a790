"""CPUs: what a deployment's replicas ask Ray for, and what Ray finds on this machine.

To Ray they are shares by which it places, no limits: what shares a machine shares its cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Where a file says nothing: `deploy/app.py` asks for these.
ROUTER_CPUS = 0.2
REPLICA_CPUS = 0.4
_BY_DEPLOYMENT = {"Router": ROUTER_CPUS, "Replica": REPLICA_CPUS}
_SERVES_OWN = 1.0  # where a file's `ray_actor_options`, which replace ours whole, do not say


def cpus_each(deployment: str, options: Mapping[str, Any]) -> float:
    """CPUs that one replica of "Router" or "Replica" takes. options: Serve's, as the file gives them."""
    actor = options.get("ray_actor_options")
    if actor is None:
        return _BY_DEPLOYMENT[deployment]
    asked = actor.get("num_cpus")
    return _SERVES_OWN if asked is None else float(asked)


def machine_cpus() -> float:
    """CPUs that a Ray started here would have: a container's limit where there is one, else all cores."""
    from ray._private.utils import get_num_cpus  # seen in ray 2.60

    return float(get_num_cpus(override_docker_cpu_warning=True))
