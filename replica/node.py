"""What a replica is, whoever puts it into service: one engine, its cache's events, its publisher.

The Serve replica (`server.py`) is one, as are those that the load test and the tests start without Ray. Knows
threads and sockets; knows no Ray.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cache.event_log import EventLog
from cache.messages import ReplicaInfo
from cache.scheduling_order import SchedulingOrder
from replica.assembly import Assembly, assemble
from replica.config import ReplicaConfig
from replica.engine.engine import Engine
from replica.machine import engines_at_once, machine_of
from replica.publisher import Publisher, new_epoch
from replica.scheduling.runner import Runner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Node:
    """An engine that runs, and what routers are to know of it."""

    assembly: Assembly
    engine: Engine
    info: ReplicaInfo


@contextlib.contextmanager
def running_node(
    config: ReplicaConfig,
    *,
    wrap: Callable[[Runner], Runner] = lambda runner: runner,
    on_death: Callable[[], None] | None = None,
) -> Iterator[Node]:
    """Load the model, open the sockets and start the engine; takes seconds to minutes.

    wrap: puts something around the runner, which stays the one that is closed.
    on_death: see `Engine`.
    At the end: engine first, then sockets, then the runner. Raises ConfigError for what cannot be served
    and EventSocketError for ports that are taken.
    """
    with contextlib.ExitStack() as undo:
        assembly = assemble(config)
        undo.callback(assembly.runner.close)
        undo.callback(assembly.structures.close)
        assembly = replace(assembly, runner=wrap(assembly.runner))
        epoch = new_epoch()
        events = EventLog(epoch)
        publisher = Publisher(
            host=config.event_host,
            port=config.event_port,
            epoch=epoch,
            tells_blocks=config.kv_events,
            order=SchedulingOrder(config.scheduling_order),
            max_batched_tokens=config.max_batched_tokens,
        )
        undo.callback(publisher.close)
        publisher.start()
        core = assembly.core(sink=events)
        engine = Engine(
            core,
            config,
            events=events,
            publish=publisher.publish,
            report=publisher.report,
            door=publisher,
            on_death=on_death,
        )
        undo.callback(engine.close)
        logger.info("warming up on %s", assembly.runner.info.device)
        engine.start()
        yield Node(assembly, engine, _info(assembly, publisher, core.max_model_len))


def _info(assembly: Assembly, publisher: Publisher, max_model_len: int) -> ReplicaInfo:
    info, config = assembly.runner.info, assembly.config
    return ReplicaInfo(
        fingerprint=assembly.fingerprint,
        event_endpoint=publisher.event_endpoint,
        snapshot_endpoint=publisher.snapshot_endpoint,
        num_blocks=info.num_blocks,
        # What a request may reach here: a pool smaller than the model's own limit is the limit.
        max_model_len=min(max_model_len, info.num_blocks * info.block_size),
        max_batched_tokens=config.max_batched_tokens,
        device=info.device,
        attention_backend=info.attention_backend,
        pid=os.getpid(),
        max_running=config.max_running,
        max_waiting=config.max_waiting,
        has_prefix_cache=config.prefix_caching,
        has_kv_events=config.kv_events,
        has_logits=info.has_logits,
        num_ranks=info.num_ranks,
        machine=machine_of(info.device),
        machine_engines=engines_at_once(info.device, _num_threads(config)),
        scheduling_order=SchedulingOrder(config.scheduling_order),
        num_host_blocks=info.num_host_blocks,
        vocab_size=info.vocab_size,
    )


def _num_threads(config: ReplicaConfig) -> int | None:
    """Of all processes that compute the model."""
    return None if config.torch_threads is None else config.torch_threads * config.tensor_parallel
