"""From checked settings to a Serve application: one Router deployment in front of one of replicas.

`serve run deploy.yaml` calls `build`. The only file that knows both `replica` and `router`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from cache.fingerprint import Fingerprint, template_digest
from deploy.config import AppConfig, router_config
from replica.config import ReplicaConfig
from replica.model_source import ResolvedModel, resolve
from replica.server import ReplicaServer
from router.ingress import api, RouterServer
from router.prompt import chat_template_of

ROUTING_KEY = "warmpath"  # one Routing per Router process; the RequestRouter finds it by this name


def build(args: dict[str, Any]) -> serve.Application:
    """The application for deploy.yaml's `args`. Raises ConfigError with key, value and range."""
    config = AppConfig.from_args(args)
    model = resolve(config.replica.model, config.replica.revision)
    replica = _on_device(config.replica, model)
    router = router_config(
        config,
        model_name=config.model_name,
        tokenizer=str(model.source),
        tokenizer_revision=model.revision if model.is_hub else None,
        fingerprint=_fingerprint(replica, model),
    )
    replicas = Replica.bind(replica)
    return Router.bind(router, replicas)


@serve.deployment(
    request_router_config=RequestRouterConfig(
        request_router_class="router.request_router:WarmpathRequestRouter",
        request_router_kwargs={"routing_key": ROUTING_KEY},
        initial_backoff_s=0.01,
    ),
)
class Replica(ReplicaServer):
    """One engine. Threads and addresses depend on the node, so they are settled here, at start."""

    def __init__(self, config: ReplicaConfig) -> None:
        super().__init__(_on_node(config))
