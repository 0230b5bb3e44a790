"""The Router as Ray Serve runs it: the HTTP surface around calls through a deployment handle.

It turns Ray's errors into ours and refuses to run where ingress and routing hook would not share one event
loop. `deploy/app.py` makes the deployment:

    serve.deployment(serve.ingress()(Ingress)).bind(router_config, ReplicaDeployment.bind(...))

with `RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0` in its runtime_env, and `WarmpathRequestRouter` as the
replica deployment's request_router_class.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from typing import TYPE_CHECKING

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
    RequestCancelledError,
)

from cache import heap
from cache.channel.server import ChannelServer
from cache.errors import ConfigError, PiecesLost, ServingError
from cache.log_fields import lose_unwritable_lines, pass_on, spell_traceback
from cache.messages import Delta, GenerateRequest, HeldPrefix, InheritPin, ReleasePin, ReplicaInfo
from cache.tracing import Tracing
from cache.types import PinId, ReplicaId
from router import cancellation
from router.assembly import RouterParts
from router.bodies.body_channel import BodiesByChannel, BodyStatistics, proxies_take_bodies
from router.bodies.body_frames import BODIES
from router.bodies.body_metrics import BodyCollector
from router.config import RouterConfig
from router.deltas.delta_calls import deltas_of
from router.deltas.delta_channels import DeltaChannels
from router.deltas.delta_metrics import DeltaCollector
from router.errors import AllBusy, NoReplica, ReplicaLost
from router.openai_api.about import Readiness
from router.openai_api.app import build_api
from router.placement.registry import register_routing, unregister_routing
from router.prefixes.tombstones import GivenBack
from router.prompts.prompt import PromptEncoder, hide_torch
from router.serve_peers import among_routers
from router.serve_receive import fetch_when_lost

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

ROUTING_KEY = "warmpath"  # one Ingress per process, so one name is enough
ONE_LOOP_VARIABLE = "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"
FAST_PATH_VARIABLE = "RAY_SERVE_THROUGHPUT_OPTIMIZED"
_DESCRIBE_RETRY_S = 1.0
_COUNT_INTERVAL_S = 5.0  # between two looks at how many Routers there are
_COUNT_TIMEOUT_S = 1.0
_BACK_PRESSURE_RETRY_AFTER_S = 1.0
# As Serve (ray 2.60) tells of a stream that ended well before it read whether that was accepted.
_OVER_UNHEARD = "Unexpected error (StatusCode.OK)"

# Serve shows this logger's lines, with replica and request named, in its console and files.
logger = logging.getLogger("ray.serve")


def check_one_loop(environment: Mapping[str, str]) -> None:
    """Raises ConfigError unless Serve will run its routing hook on the ingress's event loop."""
    by_default = "0" if environment.get(FAST_PATH_VARIABLE) == "1" else "1"
    value = environment.get(ONE_LOOP_VARIABLE, by_default)
    if value != "0":
        raise ConfigError(
            ONE_LOOP_VARIABLE,
            value,
            "must be 0, or requests would be placed and routed on two threads; set it in the Router "
            "deployment's ray_actor_options.runtime_env.env_vars",
        )


def place_among_routers(num_running: int | None = None) -> tuple[int, int]:
    """This Router's rank among the Routers, and their number, as Serve has them now. (0, 1) outside Serve.

    num_running: Routers that the latest call to all of them went to; None: there was none yet. Serve's own
    `world_size` is of when this one was started or reconfigured, which another number of Routers does to
    nobody (ray 2.60).
    """
    try:
        context = serve.get_replica_context()
    except RayServeException:
        return 0, 1
    num_routers = max(1, num_running or context.world_size or 0)
    # While Serve changes their number the two may not fit each other for a moment.
    return context.rank.rank % num_routers, num_routers


class Ingress:
    """One Router. Serve builds it, asks it for its ASGI application, and runs that application's lifespan."""

    def __init__(
        self, config: RouterConfig, replicas: DeploymentHandle, tracing: Tracing | None = None
    ) -> None:
        """Loads the tokenizer, which takes seconds. Raises ConfigError for what cannot be served.

        Serve calls this on the event loop that requests will run on.
        """
        check_one_loop(os.environ)
        _log_through_serve()
        hide_torch()
        logger.info("loading the tokenizer %s", config.tokenizer)
        encoder = PromptEncoder.load(
            config.tokenizer,
            config.tokenizer_revision,
            name=config.model_name,
            cache_bytes=config.tokenization_cache_bytes,
            max_wait_s=config.max_wait_s,
        )
        _check_template(config, encoder)
        self._loop = asyncio.get_running_loop()
        self._replicas = replicas
        self._fault: str | None = None  # why this process can never serve
        self._channels = DeltaChannels()
        self._peers = among_routers()
        self._parts = RouterParts(
            config,
            calls=HandleCalls(replicas, self._channels),
            encoder=encoder,
            version=_version(),
            peers=self._place,
            tracing=tracing,
        )
        self._parts.routing.watch_membership(self._on_membership)
        self._parts.routing.watch_membership(self._channels.update)
        self._parts.metrics.registry.register(DeltaCollector(self._channels.statistics))
        self._parts.service.readiness = self._readiness
        self._bodies: ChannelServer[bytes] | None = None
        if proxies_take_bodies(os.environ):
            self._bodies = _body_server()
        self._body_statistics = BodyStatistics()
        self._parts.metrics.registry.register(BodyCollector(lambda: self._body_statistics))
        if self._peers is not None:
            self._parts.fleet.peers = self._peers
            self._parts.directory.others = self._peers
        register_routing(ROUTING_KEY, self._parts.routing)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """What Serve serves; called once after `__init__`, on the same event loop.

        Serve counts this Router as running, and lets one go that it replaces, when this has returned.
        """
        self._meeting = asyncio.create_task(self._meet(), name="meet replicas and routers")
        await self._parts.until_model_is_served()
        # Serve's proxies put x-request-id on every answer.
        api = build_api(self._parts.service, lifespan=self._lifespan, echo_request_id=False)
        if self._bodies is not None:
            api.add_middleware(
                BodiesByChannel,
                server=self._bodies,
                statistics=self._body_statistics,
                on_whole=fetch_when_lost,
            )
        return api

    def check_health(self) -> None:
        """Serve asks this every few seconds. Raises RuntimeError when this process can never serve."""
        if self._fault is not None:
            raise RuntimeError(self._fault)

    async def fleet_report(self, asker: str, wanted: list[str]) -> bytes:
        """What this Router tells another of its metrics; called by Routers, never by clients."""
        return self._parts.fleet.answer(asker, wanted)

    async def kept_prefixes(self, asker: str) -> bytes:
        """The held prefixes that this Router keeps; called by Routers, never by clients."""
        return self._parts.directory.answer(asker)

    async def prefix_given_back(self, asker: str, pin_id: PinId) -> bool:
        """A client has given it back through another Router, which calls this."""
        return self._parts.directory.hear_given_back(asker, pin_id)

    async def prefixes_handed_on(
        self, asker: str, seconds: dict[PinId, tuple[float, float]], replicas: list[ReplicaId]
    ) -> None:
        """`GivenBack` of another Router that leaves, which calls this."""
        self._parts.directory.hear_handed_on(asker, GivenBack(seconds, tuple(replicas)))

    @contextlib.asynccontextmanager
    async def _lifespan(self, _api: FastAPI) -> AsyncIterator[None]:
        heap.settle()
        try:
            yield
        finally:
            self._meeting.cancel()
            await asyncio.gather(self._meeting, return_exceptions=True)
            unregister_routing(ROUTING_KEY)
            await self._parts.aclose()
            await self._channels.aclose()
            if self._bodies is not None:
                self._bodies.close()

    async def _meet(self) -> None:
        await self._greet_replicas()
        await self._follow_routers()

    async def _greet_replicas(self) -> None:
        """One call, answered by any replica: Serve builds the routing hook only with a handle's first call,
        and until then this Router would know of no replica."""
        describe = self._replicas.options(method_name="describe")
        while True:
            try:
                await describe.remote()
            except Exception as error:
                logger.warning("no replica answers yet", extra={"error_type": type(error).__name__})
                await asyncio.sleep(_DESCRIBE_RETRY_S)
            else:
                break

    async def _follow_routers(self) -> None:
        """How many there are now, again and again."""
        # Serve tells who they are with the first call to them: the first scrape need not wait.
        await self._parts.fleet.hear_all()
        while self._peers is not None:
            await asyncio.sleep(_COUNT_INTERVAL_S)
            await self._peers.count(_COUNT_TIMEOUT_S)

    def _place(self) -> tuple[int, int]:
        return place_among_routers(None if self._peers is None else self._peers.num_running)

    def _on_membership(self, replicas: Mapping[ReplicaId, ReplicaInfo]) -> None:
        """The routing hook speaks here first: the second, certain check that it shares our loop."""
        if asyncio.get_running_loop() is not self._loop:
            self._fault = f"the routing hook runs on another event loop: set {ONE_LOOP_VARIABLE}=0"
            logger.error(self._fault)
        logger.info("replicas: %d", len(replicas))

    def _readiness(self) -> Readiness:
        if self._fault is not None:
            return Readiness(self._fault, 0)
        return self._parts.readiness()


class HandleCalls:
    """`ReplicaCalls` and `PinCalls` over a Serve handle."""

    def __init__(self, replicas: DeploymentHandle, channels: DeltaChannels | None = None) -> None:
        """channels: for deltas; None = they come as items of the calls."""
        self._channels = channels
        # Ray's default for gRPC is cloudpickle, for functions made on the fly; values need none of its care.
        self._generate = replicas.options(
            stream=True,
            method_name="generate",
            request_serialization="pickle",
            response_serialization="pickle",
        )
        self._unpin = replicas.options(method_name="unpin")
        self._inherit = replicas.options(method_name="inherit_pin")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """See `ReplicaCalls`. Ray's errors end here."""
        channels = self._channels
        reader = None if channels is None else channels.open(request)
        response, has_ended, num_left = None, False, request.num_answers_left
        try:
            if channels is None or reader is None:
                response = deltas = self._generate.remote(request)
            else:
                response = self._generate.remote(request, reader.reply_to)
                deltas = deltas_of(_until_ended(response), reader, channels.came_by_call)
            async for delta in deltas:
                # Nothing comes after the last one: whoever has it reads no further, and there is nothing to
                # cancel. A cancel would cost both sides as much as a delta, and Serve would count it as one.
                num_left -= delta.finish_reason is not None
                has_ended = not num_left
                yield delta
                if has_ended and reader is not None:
                    return  # the call ends by itself
            has_ended = True
        except (Exception, asyncio.CancelledError) as error:
            ours = translate(error)
            # Where only the connection has ended the call goes on, and would refuse its own next attempt.
            has_ended = not isinstance(error, asyncio.CancelledError) and not isinstance(ours, PiecesLost)
            raise ours from error
        finally:
            if channels is not None and reader is not None:
                channels.close(reader)
            if response is not None and not has_ended:
                response.cancel()

    async def unpin(self, request: ReleasePin) -> bool:
        """See `PinCalls`. Ray's errors end here."""
        try:
            return bool(await self._unpin.remote(request))
        except (Exception, asyncio.CancelledError) as error:
            raise translate(error) from error

    async def inherit(self, request: InheritPin) -> HeldPrefix | None:
        """See `PinCalls`. Ray's errors end here."""
        try:
            answer: HeldPrefix | None = await self._inherit.remote(request)
        except (Exception, asyncio.CancelledError) as error:
            raise translate(error) from error
        return answer


async def _until_ended(call: AsyncIterator[Delta]) -> AsyncGenerator[Delta, None]:
    """A call's items. Serve takes a short one for failed now and then: gRPC need not deliver what precedes a
    stream's first message, in which Serve looks for whether it was accepted, and a call whose deltas go over
    a channel has no message.

    One that was not accepted has a message, and one that failed has another status.
    """
    try:
        async for item in call:
            yield item
    except RuntimeError as error:
        if not str(error).startswith(_OVER_UNHEARD):
            raise


def translate(error: BaseException) -> BaseException:
    """Ray's error as one of ours; anything else as it is."""
    if isinstance(error, RayTaskError):  # raised by our code in the replica, wrapped on the way
        cause = error.cause
        return cause if isinstance(cause, Exception) and cause is not error else error
    if isinstance(error, ServingError):
        return error
    if isinstance(error, RayActorError | ReplicaUnavailableError):
        # ActorDiedError or, over gRPC, ActorUnavailableError: either way its tokens are gone.
        return ReplicaLost(type(error).__name__)
    if isinstance(error, asyncio.CancelledError) and not cancellation.is_own():
        return ReplicaLost("the call was cancelled")  # by gRPC, when its channel is closed
    if isinstance(error, RequestCancelledError):
        return ReplicaLost("the call was cancelled")  # not by us: our own cancel is never awaited
    if isinstance(error, BackPressureError):
        return AllBusy(0, error.retry_after_s or _BACK_PRESSURE_RETRY_AFTER_S)
    if isinstance(error, DeploymentUnavailableError):
        return NoReplica()
    return error


def _body_server() -> ChannelServer[bytes] | None:
    """Where Serve's proxies fetch answers; None = they get them by calls."""
    host = ray.util.get_node_ip_address()
    try:
        server = ChannelServer(BODIES, host)
    except OSError as error:
        logger.warning("answers go to proxies by calls: cannot listen on %s: %s", host, error)
        return None
    server.start()
    return server


def _check_template(config: RouterConfig, encoder: PromptEncoder) -> None:
    expected = config.fingerprint.template_digest
    if encoder.template_digest != expected:
        # Not fatal: prompts are encoded here and sent as ids, so both sides see the same tokens.
        logger.warning("the fingerprint names another chat template than the tokenizer's")


def _version() -> str:
    try:
        return distribution_version("warmpath")
    except PackageNotFoundError:  # run from a source folder that is not installed
        return "unknown"


def _log_through_serve() -> None:
    """Let this package's own lines reach Serve's log files; a disk that is full shall cost nothing else."""
    lose_unwritable_lines()
    for package in ("router", "cache"):
        pass_on(package, logger.handlers)
    logger.addFilter(spell_traceback)  # the same function twice is one filter


__all__ = ["HandleCalls", "Ingress", "check_one_loop", "translate"]
