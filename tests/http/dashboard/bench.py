"""A Router with replicas on paper, behind HTTP: what the live page is opened on, and made to show things."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from cache.events import Load
from cache.messages import ReplicaInfo
from cache.types import ReplicaId, RequestId
from router.placement.decision import RouteQuery
from tests.fakes.http import BLOCK_SIZE, RouterUnderTest, a_replica_info
from tests.fakes.router import STEP_TIME, chain
from tests.http_server import HttpServer, scripted_server


class Bench:
    """A Router behind HTTP, and what is to be done on its event loop."""

    def __init__(self, router: RouterUnderTest, server: HttpServer) -> None:
        self.router = router
        self.url = f"{server.url}/dashboard"
        self._server = server
        self.num_decided = 0

    def do(self, act: Callable[[], Any]) -> Any:
        async def acting() -> Any:
            return act()

        return asyncio.run_coroutine_threadsafe(acting(), self._server.loop).result(10)

    def complete(self, prompt: str) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 3}
        assert httpx.post(f"{self._server.url}/v1/completions", json=body).status_code == 200

    def decide(self, count: int) -> None:
        """Answered requests that share prefixes in threes, without HTTP."""
        self.do(lambda: [self._decide() for _ in range(count)])

    def _decide(self) -> None:
        routing, self.num_decided = self.router.parts.routing, self.num_decided + 1
        name, kind = RequestId(f"request-{self.num_decided:06}"), self.num_decided % 3
        hashes = chain(name, 8, chain(f"shared-{kind}", 60 * (1 + kind)))
        num_tokens = len(hashes) * BLOCK_SIZE + 2
        query = RouteQuery(name, hashes, num_tokens, token_ids=array("i", range(num_tokens)))
        placement = routing.choose(query)
        routing.first_token(name, placement.replica_id, placement.overlap_blocks * BLOCK_SIZE)
        routing.finish(name, block_hashes=hashes, answers=(3,))

    def load(self, index: int, **changes: Any) -> None:
        fields = {"free_blocks": 600, "total_blocks": 1000, "step_time": STEP_TIME, **changes}
        replica_id = self.router.replicas[index]
        self.do(lambda: self.router.parts.routing.on_load(replica_id, Load(**fields)))

    def members(self, *names: str) -> None:
        infos: dict[ReplicaId, ReplicaInfo] = {ReplicaId(name): a_replica_info() for name in names}
        self.do(lambda: self.router.parts.routing.update_replicas(infos))


@contextlib.contextmanager
def bench(num_replicas: int = 2, **config: Any) -> Iterator[Bench]:
    settings = {"silent_after_s": 3600.0, "dashboard": True, **config}
    router = RouterUnderTest(num_replicas=num_replicas, max_model_len=10_000, **settings)
    with scripted_server(router) as server:
        yield Bench(router, server)
