"""One real deployment to do harm to: `python -m deploy serve` on a Ray cluster of its own.

Knows which process is what, how many of each there should be, and how to ask Serve for a change; knows
neither load nor what is promised. Replicas are simulated unless told otherwise: a step is a sleep of
modelled length, so capacity is exact and costs no CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import yaml

from deploy.router_variable import ROUTER_VARIABLE
from router.ingress import ONE_LOOP_VARIABLE
from tests.e2e.faults import processes
from tests.e2e.faults.processes import Process, descendants
from tests.servers import Server, running_server

SETTLE_LIMIT_S = 180.0  # a replica's replacement: import torch, load, be announced
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Spec:
    """What to start. Two equal specs may be served by one cluster, one after the other."""

    replicas: int = 3
    routers: int = 2
    replica: dict[str, Any] = field(default_factory=dict)  # args.replica beside `runner: simulated`
    router: dict[str, Any] = field(default_factory=dict)  # args.router
    deployments: dict[str, dict[str, Any]] = field(default_factory=dict)  # Serve's options, by deployment
    proxy: str = "auto"
    module: str = "deploy"  # whose `serve` starts it: `drivers.py` lists others
    proxy_location: str = "EveryNode"

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of `tests.servers.running_server`."""
        return {
            "replicas": self.replicas,
            "routers": self.routers,
            "replica": {"runner": "simulated", **self.replica},
            "router": self.router,
            "deployments": self.deployments,
            "proxy": self.proxy,
            "module": self.module,
            "proxy_location": self.proxy_location,
        }


class Cluster:
    """A running deployment. Everything it says of processes is read anew."""

    def __init__(self, spec: Spec, server: Server, token: str) -> None:
        self.spec = spec
        self.server = server
        self.url = server.url
        self._port = int(server.url.rsplit(":", 1)[1])
        self._config = yaml.safe_load((server.temp / "deploy.yaml").read_text())
        self._config["http_options"]["port"] = self._port
        self._initial = copy.deepcopy(self._config)
        # A connection per call: the proxies choose a Router per connection.
        self._client = httpx.AsyncClient(
            base_url=self.url, timeout=10, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self._serve = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self._port + 5}",
            timeout=30,
            headers={"authorization": f"Bearer {token}"},
        )

    async def aclose(self) -> None:
        await self._client.aclose()
        await self._serve.aclose()

    # -- processes ----------------------------------------------------------------------------------

    def processes(self, kind: str) -> list[Process]:
        """Those of one kind (`processes.REPLICA`, ...), oldest first."""
        below = descendants(self.server.process.pid)
        return sorted((each for each in below if _is(each, kind)), key=lambda each: each.pid)

    def pid_of(self, kind: str) -> int:
        """The only process of that kind. Raises LookupError if there is none, or several."""
        found = self.processes(kind)
        if len(found) != 1:
            raise LookupError(f"{len(found)} processes are {kind!r}")
        return found[0].pid

    async def replicas(self) -> dict[str, int]:
        """Process id of each replica that a Router would choose now, by replica id."""
        version = await self.version()
        return {each["replica_id"]: each["pid"] for each in version["replicas"]}

    def live_replicas(self) -> list[int]:
        """Process ids of the replicas' processes that run, ready or not."""
        return [each.pid for each in self.processes(processes.REPLICA)]

    def routers(self) -> list[int]:
        return [each.pid for each in self.processes(processes.ROUTER)]

    # -- what it says -------------------------------------------------------------------------------

    async def version(self) -> dict[str, Any]:
        """`GET /version`. Raises httpx.HTTPError."""
        answer: dict[str, Any] = (await self._client.get("/version")).raise_for_status().json()
        return answer

    async def metrics(self) -> dict[str, float]:
        """Every sample of `GET /metrics`, all Routers' and replicas', by name with its labels."""
        text = (await self._client.get("/metrics")).raise_for_status().text
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    async def total(self, name: str, **labels: str) -> float:
        """Sum of one metric's samples that carry these labels; 0 when there is none."""
        return total(await self.metrics(), name, **labels)

    async def routers_known(self) -> tuple[str, int]:
        """The name of the Router that answers, and how many it knows of. It needs `expose_debug`."""
        page = (await self._client.get("/debug/route", params={"last": 0})).raise_for_status().json()
        return page["summary"]["router"], page["summary"]["num_routers"]

    async def applications(self) -> dict[str, Any]:
        """Serve's own account: GET /api/serve/applications/."""
        answer = (await self._serve.get("/api/serve/applications/")).raise_for_status()
        found: dict[str, Any] = answer.json()["applications"]["warmpath"]
        return found

    # -- changes ------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """A copy of the deployment's file as deployed last: change it and `deploy` it."""
        return copy.deepcopy(self._config)

    async def deploy(self, config: dict[str, Any]) -> None:
        """Hand Serve another file, as `serve deploy` does. Returns as soon as Serve has taken it."""
        answer = await self._serve.put("/api/serve/applications/", content=json.dumps(config))
        answer.raise_for_status()
        self._config = copy.deepcopy(config)

    async def scale(self, deployment: str, num_replicas: int) -> None:
        """Another number of replicas of `Router` or `Replica`. Serve restarts none of the others."""
        config = self.config()
        _options(config, deployment)["num_replicas"] = num_replicas
        await self.deploy(config)

    async def redeploy(self, *, replica: Mapping[str, Any]) -> None:
        """Other settings in `args`. Serve replaces all Routers and replicas for any, a few at a time."""
        config = self.config()
        config["applications"][0]["args"]["replica"].update(replica)
        await self.deploy(config)

    async def change_routers(self, settings: Mapping[str, Any]) -> None:
        """Other settings of the Routers alone. Serve replaces them, a few at a time, and no replica."""
        config = self.config()
        _options(config, "Router")["ray_actor_options"] = {
            "num_cpus": 0.2,
            "runtime_env": {
                "env_vars": {ONE_LOOP_VARIABLE: "0", ROUTER_VARIABLE: yaml.safe_dump(dict(settings))}
            },
        }
        await self.deploy(config)

    async def restore(self) -> None:
        """As it was started; returns when everything is ready."""
        if self._config != self._initial:
            await self.deploy(copy.deepcopy(self._initial))
        await self.until_ready()

    async def until_ready(
        self, replicas: int | None = None, routers: int | None = None, *, limit_s: float = SETTLE_LIMIT_S
    ) -> float:
        """Wait until Serve says HEALTHY and each Router sees `replicas` of them. Returns seconds waited.

        None: as the deployed file says. Raises TimeoutError.
        """
        config = self.config()
        replicas = _options(config, "Replica")["num_replicas"] if replicas is None else replicas
        routers = _options(config, "Router")["num_replicas"] if routers is None else routers
        began = time.monotonic()
        async with asyncio.timeout(limit_s):
            while True:
                if await self._is_ready(replicas, routers):
                    return time.monotonic() - began
                await asyncio.sleep(_POLL_S)

    async def _is_ready(self, replicas: int, routers: int) -> bool:
        if len(self.routers()) != routers or len(self.live_replicas()) != replicas:
            return False
        with contextlib.suppress(httpx.HTTPError, KeyError):
            application = await self.applications()
            if application["status"] != "RUNNING":
                return False
            seen = await self.metrics()
            known = [value for name, value in seen.items() if name.startswith("warmpath_replicas{")]
            # Stopped processes may still be announced: those that run are those that are known.
            if known != [replicas] * routers:
                return False
            return set((await self.replicas()).values()) == set(self.live_replicas())
        return False


def total(samples: Mapping[str, float], name: str, **labels: str) -> float:
    """Sum of one metric's samples that carry these labels; 0 when there is none."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for key, value in samples.items()
        if key.partition("{")[0] == name and all(label in key for label in wanted)
    )


class Clusters:
    """Starts clusters, and keeps the latest for whoever wants an equal one next: a start takes 10 to 30 s.

    Owner: one task. `aclose` stops what still runs.
    """

    def __init__(self) -> None:
        self._current: Cluster | None = None
        self._stack = contextlib.AsyncExitStack()

    @contextlib.asynccontextmanager
    async def borrow(self, spec: Spec) -> AsyncIterator[Cluster]:
        """A cluster of this kind, ready, alone. It is kept once it is ready again, and restored for whoever
        borrows it next; after an error it is stopped."""
        if self._current is None or self._current.spec != spec:
            await self.aclose()
            self._current = await self._stack.enter_async_context(_started(spec))
        try:
            await self._current.restore()
            yield self._current
            await self._current.until_ready()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        self._current = None
        await self._stack.aclose()


_shared = Clusters()


@contextlib.asynccontextmanager
async def cluster(spec: Spec | None = None) -> AsyncIterator[Cluster]:
    """A cluster of this kind, ready, alone; perhaps one that an earlier promise was tried on.

    Whoever runs promises calls `stop_clusters` at the end.
    """
    async with _shared.borrow(spec or Spec()) as running:
        yield running


async def stop_clusters() -> None:
    """Stop what `cluster` has kept. Idempotent."""
    await _shared.aclose()


@contextlib.asynccontextmanager
async def _started(spec: Spec) -> AsyncIterator[Cluster]:
    token = secrets.token_hex(16)  # of its own, so that no other cluster's is needed, or found
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    options = ["--ray-dashboard"]  # whose HTTP API takes what `Cluster.deploy` hands over
    manager = running_server(options=options, environment=environment, **spec.settings)
    server = await asyncio.to_thread(manager.__enter__)
    try:
        running = Cluster(spec, server, token)
        try:
            yield running
        finally:
            await running.aclose()
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


def _is(process: Process, kind: str) -> bool:
    first = process.command.partition(" ")[0]
    return process.command.startswith(kind) or first.endswith(f"/{kind}")


def _options(config: dict[str, Any], deployment: str) -> dict[str, Any]:
    for options in config["applications"][0]["deployments"]:
        if options["name"] == deployment:
            found: dict[str, Any] = options
            return found
    raise LookupError(deployment)
