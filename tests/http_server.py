"""The Router behind a real HTTP server on a free port, in a thread of this process.

`scripted_server`: the replicas follow a script. `engine_server`: they are real engines that run the embedded
model, with their caches, events and block hashes. Serve and Ray have no part in either.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from cache.messages import Delta, GenerateRequest, HeldPrefix, InheritPin, ReleasePin
from cache.tracing import Tracing
from cache.types import ReplicaId
from replica.config import ReplicaConfig
from replica.engine.request_watch import RequestLog, RequestTraces
from replica.node import Node, running_node
from router.assembly import RouterParts
from router.config import RouterConfig
from router.openai_api.app import build_api
from router.prompts.prompt import PromptEncoder
from tests.fakes.http import RouterUnderTest

MODEL = "tiny"
_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 20.0


@dataclass(frozen=True)
class HttpServer:
    """One that runs. `loop` is the Router's: what belongs to the Router is to be touched there only."""

    url: str
    port: int
    loop: asyncio.AbstractEventLoop


@contextlib.contextmanager
def serving(make_app: Callable[[], AbstractAsyncContextManager[ASGIApp]]) -> Iterator[HttpServer]:
    """Enter `make_app` on an event loop in a thread of its own, and serve it there until this ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    ready = threading.Event()
    state: dict[str, object] = {}

    async def run() -> None:
        async with make_app() as app:
            settings = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=5)
            server = uvicorn.Server(settings)
            state.update(server=server, loop=asyncio.get_running_loop())
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started and not serving.done():  # noqa: ASYNC110  # uvicorn has no event for it
                await asyncio.sleep(0.01)
            ready.set()
            await serving

    def work() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            state["error"] = error
        finally:
            ready.set()

    thread = threading.Thread(target=work, name="http server", daemon=True)
    thread.start()
    try:
        assert ready.wait(_START_LIMIT_S), "the server did not start"
        if isinstance(error := state.get("error"), BaseException):
            raise error
        loop = state["loop"]
        assert isinstance(loop, asyncio.AbstractEventLoop)
        yield HttpServer(f"http://127.0.0.1:{port}", port, loop)
    finally:
        server = state.get("server")
        if isinstance(server, uvicorn.Server):
            server.should_exit = True
        thread.join(_STOP_LIMIT_S)
        listener.close()
        assert not thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def scripted_server(router: RouterUnderTest) -> Iterator[HttpServer]:
    """Around a Router whose replicas follow its scripts; it is entered here."""

    @contextlib.asynccontextmanager
    async def make_app() -> AsyncIterator[ASGIApp]:
        async with router:
            yield router.api

    with serving(make_app) as server:
        yield server


@contextlib.contextmanager
def engine_server(
    *,
    num_replicas: int = 2,
    num_blocks: int = 512,
    tracing: Tracing | None = None,
    replica: Mapping[str, Any] | None = None,
    **config: object,
) -> Iterator[HttpServer]:
    """Around real engines. config: of the Router, beside what follows from the engines.

    tracing: of the Router and the engines, which then log every request too.

    num_blocks: of each replica's cache, 16 tokens each; a request has no room for more.
    replica: other settings of the replicas.
    """
    fleet = EngineFleet(num_replicas, num_blocks, tracing, replica)

    @contextlib.asynccontextmanager
    async def make_app() -> AsyncIterator[ASGIApp]:
        async with fleet.router(**config) as parts:
            yield build_api(parts.service)

    with fleet, serving(make_app) as server:
        yield server


class EngineFleet:
    """Engines over the embedded model, and the calls to them. `with` it from any thread."""

    def __init__(
        self,
        num_replicas: int,
        num_blocks: int,
        tracing: Tracing | None = None,
        replica: Mapping[str, Any] | None = None,
    ) -> None:
        self._config = ReplicaConfig(
            **{"model": MODEL, "num_blocks": num_blocks, "torch_threads": 1, **(replica or {})}
        )
        self._tracing = tracing
        self._ids = [ReplicaId(f"replica-{index}") for index in range(num_replicas)]
        self._undo = contextlib.ExitStack()
        self._nodes: dict[ReplicaId, Node] = {}
        self._parts: RouterParts | None = None

    def __enter__(self) -> EngineFleet:
        with contextlib.ExitStack() as undo:
            self._nodes = {name: undo.enter_context(running_node(self._config)) for name in self._ids}
            if self._tracing is not None:
                for node in self._nodes.values():
                    node.engine.watch(RequestTraces(self._tracing))
                    node.engine.watch(RequestLog())
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._undo.close()

    @contextlib.asynccontextmanager
    async def router(self, **config: object) -> AsyncIterator[RouterParts]:
        """A Router that knows what every engine caches. Must be entered on the loop it will run on."""
        assembly = next(iter(self._nodes.values())).assembly
        settings = RouterConfig(
            model_name=MODEL,
            tokenizer=str(assembly.model.folder),
            fingerprint=assembly.fingerprint,
            **config,  # type: ignore[arg-type]
        )
        encoder = PromptEncoder.load(str(assembly.model.folder), name=MODEL)
        parts = self._parts = RouterParts(
            settings, calls=self, encoder=encoder, version="test", tracing=self._tracing
        )
        parts.routing.update_replicas({name: node.info for name, node in self._nodes.items()})
        while parts.readiness().reason is not None:  # noqa: ASYNC110  # nor has a Router: it is asked
            await asyncio.sleep(0.01)
        try:
            yield parts
        finally:
            await parts.aclose()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        """`ReplicaCalls`: the first rank takes it."""
        assert self._parts is not None
        replica_id = request.ranks[0]
        self._parts.routing.routed(request.request_id, replica_id)
        async with contextlib.aclosing(self._nodes[replica_id].engine.generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def unpin(self, request: ReleasePin) -> bool:
        """`PinCalls`."""
        return await self._nodes[request.replica_id].engine.unpin(request.pin_id)

    async def inherit(self, request: InheritPin) -> HeldPrefix | None:
        """`PinCalls`."""
        engine = self._nodes[request.replica_id].engine
        return await engine.inherit(request.pin_id, request.keeper, request.heir)
