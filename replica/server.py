"""One replica as Ray Serve sees it: starts a node, streams generations, says how it is.

The only file of `replica` that knows Ray; `deploy/app.py` makes a deployment of it. Thin: what can be
decided without Serve is decided in `node.py` and `engine/`. Written against ray 2.60; what is private of it
is in `_serve_replica` and `_given_by`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from cache import heap
from cache.channel.frames import ReplyTo
from cache.channel.server import ChannelServer, Outlet
from cache.delta_frames import DELTAS
from cache.errors import LeftUnread, RequestRefused
from cache.log_fields import lose_unwritable_lines, pass_on, spell_traceback
from cache.messages import Delta, GenerateRequest, HeldPrefix, InheritPin, ReleasePin
from cache.pickled import missing_field
from cache.tracing import Tracing
from replica.config import ReplicaConfig
from replica.demand import Demand
from replica.departure import Departure
from replica.engine.request_watch import RequestLog, RequestTraces
from replica.engine.watchdog import end_process
from replica.errors import EventSocketError
from replica.node import running_node

METADATA_KEY = "warmpath"

# Serve shows this logger's lines, with replica and request named, in its console and files.
logger = logging.getLogger("ray.serve")


class ReplicaServer:
    """Serves from the moment it is built: `__init__` loads the model and warms it up."""

    def __init__(
        self, config: ReplicaConfig, *, log_requests: bool = False, tracing: Tracing | None = None
    ) -> None:
        """log_requests: a line for every request that ends. tracing: closed with this.

        Raises ConfigError for what cannot be served and EventSocketError for ports that are taken.
        """
        with contextlib.ExitStack() as undo:
            _log_through_serve()
            logger.info("loading %s (%s runner)", config.model, config.runner)
            if tracing is not None:
                undo.callback(tracing.close)
            # Serve replaces a process that has gone at once, one that is ill after three health checks.
            node = undo.enter_context(
                running_node(config, on_death=end_process if _replica_id() is not None else None)
            )
            if log_requests:
                node.engine.watch(RequestLog())
            if tracing is not None:
                node.engine.watch(RequestTraces(tracing))
            if (given_s := _given_by(_serve_replica())) is not None:
                departure = Departure(node.engine, given_s)
                departure.start()
                undo.callback(departure.close)
            self._config = config
            self._engine = node.engine
            self._deltas = _delta_server(config)
            if self._deltas is not None:
                undo.callback(self._deltas.close)
                _start_if_on_a_loop(self._deltas)
            self._demand = Demand(
                node.engine,
                max_running=config.max_running,
                max_batched_tokens=config.max_batched_tokens,
                block_size=node.info.fingerprint.block_size,
            )
            self._info = replace(node.info, delta_endpoint=self._deltas.endpoint if self._deltas else "")
            self._close = undo.pop_all()
        if _replica_id() is not None:  # a process of its own
            heap.settle()
        info = self._info
        logger.info(
            "ready: %s%s, %s attention, %d blocks of %d tokens",
            info.device,
            f", {info.num_ranks} ranks" if info.num_ranks > 1 else "",
            info.attention_backend,
            info.num_blocks,
            info.fingerprint.block_size,
        )

    async def generate(
        self, request: GenerateRequest, reply_to: ReplyTo | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Stream one generation; cancelling it cancels the request. Raises RequestRefused in its kinds, and
        LeftUnread.

        reply_to: where its deltas are wanted. Those that go there are not yielded; what cannot go there is.
        """
        if (name := missing_field(request)) is not None:
            # By its root: a Router of another version has to know the type, too.
            raise RequestRefused(f"{name}: was not sent, as by a router of another version")
        self._demand.told(request.held_s, request.refused_ratio)
        async with contextlib.aclosing(self._engine.generate(request)) as deltas:
            outlet = self._outlet(reply_to)
            if outlet is None:
                async for delta in deltas:
                    yield delta
                return
            with outlet:
                async for delta in deltas:
                    await outlet.send(delta)

    async def unpin(self, request: ReleasePin) -> bool:
        """Give back what a pin holds here; whether it held something. Raises EngineStopped."""
        return await self._engine.unpin(request.pin_id)

    async def inherit_pin(self, request: InheritPin) -> HeldPrefix | None:
        """Another Router keeps what a pin holds here: what that is. Raises EngineStopped.

        None: it is not held, or another's by now.
        """
        return await self._engine.inherit(request.pin_id, request.keeper, request.heir)

    def _outlet(self, reply_to: ReplyTo | None) -> Outlet[Delta] | None:
        if self._deltas is None:
            return None
        self._deltas.start()
        return self._deltas.outlet(reply_to)

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

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks this every few seconds where replicas scale, and hands it to the policy that decides."""
        return self._demand.stats()

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


def _delta_server(config: ReplicaConfig) -> ChannelServer[Delta] | None:
    """Where Routers connect for deltas; None = these come by calls. Raises EventSocketError."""
    if config.delta_channel and os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        logger.info("calls between nodes are encrypted, so deltas come by them")
        return None
    if not config.delta_channel:
        return None
    port = config.event_port and config.event_port + 2
    try:
        return ChannelServer(DELTAS, config.event_host, port)
    except OSError as error:
        raise EventSocketError(config.event_host, port, str(error)) from error


def _start_if_on_a_loop(deltas: ChannelServer[Delta]) -> None:
    """Serve builds a replica on its event loop: Routers can connect before the first call."""
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        deltas.start()


def _replica_id() -> str | None:
    """This replica's id in Serve; None outside of it."""
    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:
        return None


def _serve_replica() -> Any:
    """The object Serve runs this replica with; None outside of Serve, or where it is not found."""
    if _replica_id() is None:
        return None
    actors = getattr(ray._private.worker.global_worker, "actors", {}).values()
    return next((actor._replica_impl for actor in actors if hasattr(actor, "_replica_impl")), None)


def _given_by(replica: Any) -> Callable[[], float | None] | None:
    """How long Serve gives this replica once it stops it; None where it cannot be asked.

    Serve tells a replica nothing when it begins to stop it: its only hook, `__del__`, comes after the last
    request has ended. Routers do hear of it from Serve, so without this they only hear it once.
    """
    if not hasattr(replica, "_shutting_down"):
        if replica is not None or _replica_id() is not None:
            logger.warning(
                "this Serve does not show when it stops a replica: routers hear it from Serve alone"
            )
        return None

    def given_s() -> float | None:
        if not replica._shutting_down:
            return None
        return float(replica._deployment_config.graceful_shutdown_timeout_s)

    return given_s


def _log_through_serve() -> None:
    """Let the engine's own lines reach Serve's log files; a disk that is full shall cost nothing else.
    Changes nothing outside Serve."""
    if _replica_id() is None:
        return
    lose_unwritable_lines()
    serves = logging.getLogger("ray.serve")
    for package in ("replica", "cache"):
        pass_on(package, serves.handlers)
    for each in (_is_no_refusal, spell_traceback):
        serves.addFilter(each)  # the same function twice is one filter


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """Whether it is to be logged. Serve logs what is refused as failed, with a traceback: a full queue, a
    client's deadline, a stream handed over or not read. Routers count these; a failed forward has a line of
    its own."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, RequestRefused | LeftUnread)
