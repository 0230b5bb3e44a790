"""From checked settings to a Serve application: a Router deployment in front of one of replicas.

`serve run deploy.yaml` calls `build`. The only place where `replica` and `router` are put together: they get
one fingerprint here, so they cannot disagree about hashes.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from cache.errors import ConfigError
from deploy.agreement import REPLICA_MAX_ONGOING, ROUTER_MAX_ONGOING, check_settings
from deploy.config import AppConfig, router_config
from deploy.cpus import REPLICA_CPUS, ROUTER_CPUS
from deploy.router_settings import laid_over
from deploy.router_variable import ROUTER_VARIABLE
from deploy.tokenizer import checked_template
from deploy.traces import open_tracing
from replica.assembly import replica_fingerprint
from replica.config import ReplicaConfig
from replica.models.config_rules import check_config
from replica.models.generation_config import sampling_defaults
from replica.models.model_source import ResolvedModel, resolve, stored_dtype
from replica.models.weight_files import check_weights
from replica.server import ReplicaServer
from router.config import RouterConfig
from router.ingress import ONE_LOOP_VARIABLE, ROUTING_KEY, Ingress
from router.prompts.prompt import hide_torch

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")

REQUEST_ROUTER = "router.request_router:WarmpathRequestRouter"


def build(args: dict[str, Any]) -> serve.Application:
    """The application for deploy.yaml's `args`. Raises ConfigError with key, value and range."""
    config = AppConfig.from_args(args)
    check_settings(config.router_sketch(), config.replica)
    _runs_no_model()
    model = resolve(config.replica.model, config.replica.revision)
    if config.replica.runner != "simulated":
        # Before a rolling update has stopped a replica for one that cannot start.
        check_weights(model)
        check_config(model, config.replica.max_model_len)
    chat_template = checked_template(model)
    # Pinned: who starts later would load what a branch, or the folder, has become by then, beside others that
    # run on.
    pinned = replace(config.replica, revision=model.revision)
    replica = _on_hardware(pinned, model, num_gpus=ray.cluster_resources().get("GPU", 0.0))
    tokenizer, tokenizer_revision = str(model.folder), None
    if model.hub_id is not None:  # every node fetches it by name
        tokenizer, tokenizer_revision = model.hub_id, model.revision
    router = router_config(
        config,
        model_name=config.model_name,
        tokenizer=tokenizer,
        tokenizer_revision=tokenizer_revision,
        # A simulation has no logits for some of it, and would refuse whoever does not name those.
        model_sampling={} if replica.runner == "simulated" else sampling_defaults(model),
        fingerprint=replica_fingerprint(
            replica,
            model,
            kv_dtype="simulated" if replica.runner == "simulated" else replica.dtype,
            chat_template=chat_template,
        ),
    )
    actor_options = {"num_gpus": replica.tensor_parallel} if replica.device == "cuda" else {}
    replicas = Replica.options(ray_actor_options={"num_cpus": REPLICA_CPUS, **actor_options}).bind(
        replica, log_requests=router.log_requests, traces=router.traces
    )
    return Router.bind(router, replicas, replica)


class NodeReplica(ReplicaServer):
    """One engine. What depends on the node it landed on is settled when it starts there."""

    def __init__(
        self, config: ReplicaConfig, *, log_requests: bool = False, traces: str | None = None
    ) -> None:
        if config.runner == "simulated":
            _runs_no_model()
        tracing = open_tracing(traces, component="replica") if traces is not None else None
        super().__init__(_on_node(config), log_requests=log_requests, tracing=tracing)


class NodeRouter(Ingress):
    """One Router, by its settings and what its environment lays over them; with traces if these name where
    they go."""

    def __init__(self, config: RouterConfig, replicas: DeploymentHandle, replica: ReplicaConfig) -> None:
        """replica: what the settings have to go with."""
        own = os.environ.get(ROUTER_VARIABLE)
        if own is not None:
            config = laid_over(config, own, replica)
            logger.info("settings of %s are laid over args.router", ROUTER_VARIABLE)
        super().__init__(config, replicas, open_tracing(config.traces, component="router"))


# Names and options here are the defaults; deploy.yaml's `deployments` section overrides them by name.
Replica = serve.deployment(
    name="Replica",
    max_ongoing_requests=REPLICA_MAX_ONGOING,
    request_router_config=RequestRouterConfig(
        request_router_class=REQUEST_ROUTER,
        request_router_kwargs={"routing_key": ROUTING_KEY},
        initial_backoff_s=0.01,
        max_backoff_s=0.2,
    ),
)(NodeReplica)

Router = serve.deployment(
    name="Router",
    max_ongoing_requests=ROUTER_MAX_ONGOING,
    ray_actor_options={
        "num_cpus": ROUTER_CPUS,
        # Places and routes on one event loop in every mode of Serve: docs/design/001-serving-on-ray.md.
        "runtime_env": {"env_vars": {ONE_LOOP_VARIABLE: "0"}},
    },
)(serve.ingress()(NodeRouter))


def _runs_no_model() -> None:
    """Keep torch out of a process that Ray has started for this: what a tokenizer would bring of it takes one
    to two seconds and 180 MB. Whoever builds in a process of their own may want torch there."""
    # To ask for the context where there is no Ray would start one.
    if ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
        hide_torch()


def _on_hardware(config: ReplicaConfig, model: ResolvedModel, *, num_gpus: float) -> ReplicaConfig:
    """`auto` settled: CUDA where the cluster has GPUs, float32 on CPU, the checkpoint's own dtype on CUDA.

    Settled here because the KV dtype is part of the fingerprint, which Router and replicas must share.
    `cuda` stands whether or not there is a GPU yet.
    """
    device = config.device
    if device == "auto":
        device = "cuda" if num_gpus > 0 else "cpu"
    elif device == "cuda" and not num_gpus:
        # Not refused: on Kubernetes this is built before a node with a GPU has joined, and Serve never
        # tries again what failed to build. Where all nodes are there already, the launcher has refused it.
        logger.warning("no GPU in this cluster yet: replicas wait until a node with one joins")
    dtype = config.dtype
    if dtype == "auto":
        dtype = stored_dtype(model) if device == "cuda" else "float32"
    return replace(config, device=device, dtype=dtype)


def _on_node(config: ReplicaConfig) -> ReplicaConfig:
    """This node's cores and free memory, divided by the replicas on it. `event_host: node`: its address.

    Raises ConfigError where it would compute on a card that Ray has not given it.

    Where replicas scale Serve says 0 of them, and how many will come here is unknown: it is as for one.
    """
    replicas_here = max(1, -(-serve.get_replica_context().world_size // _num_homes()))
    if config.torch_threads is None:
        config = replace(config, torch_threads=max(1, len(os.sched_getaffinity(0)) // replicas_here))
    if config.num_blocks is None and config.device == "cpu":
        # Replicas that start together all see the same free memory. On GPUs each sees its own card.
        config = replace(config, kv_memory_fraction=max(0.01, config.kv_memory_fraction / replicas_here))
    if config.device == "cuda" and config.runner != "simulated":
        config = replace(config, device_share=min(config.device_share, _part_of_card()))
    if config.event_host == "node":
        config = replace(config, event_host=ray.util.get_node_ip_address())
    return config


def _num_homes() -> int:
    """Nodes that a replica may be on: a head without CPUs takes none, and neither does a node for Routers."""
    asked = {
        name: amount
        for name, amount in ray.get_runtime_context().get_assigned_resources().items()
        if "_group_" not in name  # a placement group's own, which only its node has
    }
    homes = [
        node
        for node in ray.nodes()
        if node["Alive"] and all(node["Resources"].get(name, 0.0) >= asked[name] for name in asked)
    ]
    return max(1, len(homes))


def _part_of_card() -> float:
    """What of its card this replica has, where Ray gives others the rest; 1 where it has all of it.

    Raises ConfigError where Ray has given it none: all are seen then, and all such replicas take the first.
    """
    num_gpus = float(ray.get_runtime_context().get_assigned_resources().get("GPU", 0.0))
    if not num_gpus:
        accepted = (
            "must be above 0 where device is cuda, or auto in a cluster with GPUs; for CPUs, device: cpu"
        )
        raise ConfigError("ray_actor_options.num_gpus", num_gpus, accepted)
    return min(1.0, num_gpus)
