"""One replica as Ray Serve sees it: builds engine and publisher, streams generations, says how it is.

The only file of `replica` that knows Ray; `deploy/app.py` makes a deployment of it. Thin: what can be
decided without Serve is decided in `engine.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException

from cache.events import EventLog
from cache.log_fields import pass_on
from cache.messages import Delta, GenerateRequest, ReplicaInfo
from replica.assembly import Assembly, assemble
from replica.config import ReplicaConfig
from replica.engine import Engine
from replica.publisher import Publisher, new_epoch

METADATA_KEY = "warmpath"

# Serve shows this logger's lines, with replica and request named, in its console and files.
logger = logging.getLogger("ray.serve")


class ReplicaServer:
    """Serves from the moment it is built: `__init__` loads the model and warms it up."""

    def __init__(self, config: ReplicaConfig) -> None:
        """Raises ConfigError for what cannot be served and EventSocketError for ports that are taken."""
        with contextlib.ExitStack() as undo:
            _log_through_serve()
            logger.info("loading %s (%s runner)", config.model, config.runner)
            assembly = assemble(config)
            undo.callback(assembly.runner.close)
            epoch = new_epoch()
            events = EventLog(epoch)
            publisher = Publisher(
                host=config.event_host,
                port=config.event_port,
                epoch=epoch,
                tells_blocks=config.kv_events,
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
            )
            undo.callback(engine.close)
            logger.info("warming up on %s", assembly.runner.info.device)
            engine.start()
            self._config = config
            self._engine = engine
            self._info = _replica_info(assembly, publisher, core.max_model_len)
            self._close = undo.pop_all()  # engine first, then sockets, then the runner
        info = self._info
        logger.info(
            "ready: %s, %s attention, %d blocks of %d tokens",
            info.device,
            info.attention_backend,
            info.num_blocks,
            info.fingerprint.block_size,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """Stream one generation; cancelling it cancels the request. Raises RequestRefused in its kinds."""
        async with contextlib.aclosing(self._engine.generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    def describe(self) -> dict[str, Any]:
        """`ReplicaInfo` as JSON, and what else is worth telling an operator."""
        return {
            **self._info.to_json(),
            "model_name": self._config.model_name or self._config.model,
            "runner": self._config.runner,
            "replica_id": _replica_id(),
        }

    def record_replica_metadata(self) -> dict[str, Any]:
        """Serve hands this to every router together with the news that the replica runs."""
        return {METADATA_KEY: self._info.to_json()}

    def check_health(self) -> None:
        """Serve asks this every few seconds. Raises EngineStopped when nothing can be served."""
        self._engine.check_health()

    def shutdown(self) -> None:
        """Stop the engine, close sockets and give the model back. May be called twice."""
        close: contextlib.ExitStack | None = getattr(self, "_close", None)  # None: `__init__` failed
        if close is not None:
            close.close()

    def __del__(self) -> None:
        # Serve calls it when a replica leaves, after its requests have ended.
        self.shutdown()


def _replica_info(assembly: Assembly, publisher: Publisher, max_model_len: int) -> ReplicaInfo:
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
    )


def _replica_id() -> str | None:
    """This replica's id in Serve; None outside of it."""
    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:
        return None


def _log_through_serve() -> None:
    """Let the engine's own lines reach Serve's log files. Changes nothing outside Serve."""
    if _replica_id() is None:
        return
    for package in ("replica", "cache"):
        pass_on(package, logging.getLogger("ray.serve").handlers)
