"""Real replicas behind real routers, in real time: what the simulation is held against.

Each replica is a process (`real_replica.py`); the routers are in this process: each production's `Routing`,
listening to the replicas' sockets by itself, and knowing of the others what the replicas tell. Requests come
by the clock, whatever has become of earlier ones, to one of the routers at random.
Knows processes, sockets and time; knows nothing of the simulation's clock.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Self

from cache.block_hash import BlockHasher
from cache.counted import counted
from cache.messages import GenerateRequest, ReplicaInfo, SamplingParams
from cache.types import BlockHash, ReplicaId, RequestId
from loadtest.signals import deaf_children
from loadtest.simulation.errors import FleetFailed
from loadtest.simulation.real_replica import (
    Finished,
    FirstToken,
    Ready,
    Step,
    Steps,
    Stop,
    Stretch,
    TellSteps,
    serve,
)
from loadtest.workloads.request import Workload, WorkRequest
from replica.config import ReplicaConfig
from router.config import RouterConfig
from router.events.subscriber import SubscriberGroup
from router.placement.decision import Placement, RouteQuery
from router.placement.placing import PromptPlacer, make_placer
from router.placement.routing import Routing

START_TIMEOUT_S = 180.0
END_TIMEOUT_S = 300.0  # from the last arrival to the last token


@dataclass(frozen=True, slots=True)
class RealRun:
    """One workload's way through the fleet; per request, in order of arrival."""

    ttft_s: list[float]  # from the time it was due to the first token here
    cached_tokens: list[int]
    replica: list[int]
    steps: tuple[Step, ...]  # of all replicas


class RealFleet:
    """An async context manager: replicas run between enter and exit."""

    def __init__(self, config: ReplicaConfig, num_replicas: int) -> None:
        self._config = config
        self._num_replicas = num_replicas
        self._replicas: list[_Replica] = []

    async def __aenter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        for number in range(self._num_replicas):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(theirs, self._config),
                name=f"replica {number}",
                daemon=True,
            )
            with deaf_children():
                process.start()
            theirs.close()
            self._replicas.append(_Replica(ReplicaId(f"r{number}"), process, ours))
        await asyncio.gather(*(replica.wait_until_ready() for replica in self._replicas))
        return self

    async def __aexit__(self, *_: object) -> None:
        for replica in self._replicas:
            await replica.aclose()

    async def run(
        self,
        workload: Workload,
        *,
        policy: str,
        seed: int,
        salt: str,
        binding: str = "at_once",
        num_routers: int = 1,
    ) -> RealRun:
        """Send the workload by the clock; until the last token. salt: another one finds no cached block.

        Raises FleetFailed if a request ends otherwise than with its last token.
        """
        replicas = {replica.replica_id: replica for replica in self._replicas}
        async with AsyncExitStack() as stack:
            routers = [
                await stack.enter_async_context(
                    _Router(replicas, policy, seed, salt, binding, (rank, num_routers))
                )
                for rank in range(num_routers)
            ]
            await self._steps()  # those of what was before
            calls = await _send(workload, routers, random.Random(f"{seed} routers"))
            steps = await self._steps()
        index = {replica.replica_id: number for number, replica in enumerate(self._replicas)}
        return RealRun(
            ttft_s=[call.ttft_s for call in calls],
            cached_tokens=[call.cached_tokens for call in calls],
            replica=[index[call.replica_id] for call in calls],
            steps=steps,
        )

    def stretch(self, factor: float) -> None:
        """From now on every step takes `factor` times its processor time."""
        for replica in self._replicas:
            replica.stretch(factor)

    async def way_s(self) -> float:
        """Seconds to an idle replica and back, the median of some tries."""
        times = []
        for _ in range(20):
            began_s = time.monotonic()
            await self._replicas[0].steps()
            times.append(time.monotonic() - began_s)
        return sorted(times)[len(times) // 2]

    async def _steps(self) -> tuple[Step, ...]:
        told = await asyncio.gather(*(replica.steps() for replica in self._replicas))
        return tuple(step for of_one in told for step in of_one.steps)


class _Replica:
    """This side of one replica's pipe. Event loop only."""

    def __init__(self, replica_id: ReplicaId, process: SpawnProcess, pipe: Connection) -> None:
        self.replica_id = replica_id
        self._process = process
        self._pipe = pipe
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._steps: asyncio.Future[Steps] | None = None
        self._calls: dict[RequestId, _Call | _Copy] = {}
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._read)

    @property
    def info(self) -> ReplicaInfo:
        return self._ready.result().info

    @property
    def vocab_size(self) -> int:
        return self._ready.result().vocab_size

    async def wait_until_ready(self) -> None:
        try:
            await asyncio.wait_for(self._ready, START_TIMEOUT_S)
        except TimeoutError:
            raise FleetFailed(f"{self._process.name} was not ready after {START_TIMEOUT_S:g} s") from None

    def send(self, request: GenerateRequest, call: _Call | _Copy) -> None:
        self._calls[request.request_id] = call
        self._say(request)

    def stretch(self, factor: float) -> None:
        self._say(Stretch(factor))

    async def steps(self) -> Steps:
        self._steps = asyncio.get_running_loop().create_future()
        self._say(TellSteps())
        return await self._steps

    async def aclose(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        if self._process.is_alive():
            with suppress(FleetFailed):
                self._say(Stop())
            await asyncio.to_thread(self._process.join, 30.0)
        if self._process.is_alive():
            self._process.terminate()
            await asyncio.to_thread(self._process.join, 10.0)
        self._pipe.close()

    def _say(self, message: object) -> None:
        """Raises FleetFailed."""
        try:
            self._pipe.send(message)
        except BrokenPipeError:
            raise self._died() from None

    def _died(self) -> FleetFailed:
        return FleetFailed(f"{self._process.name} has died")

    def _read(self) -> None:
        try:
            while self._pipe.poll():
                self._take(self._pipe.recv())
        except (EOFError, ConnectionResetError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self._fail(self._died())

    def _take(self, message: object) -> None:
        match message:
            case Ready():
                self._ready.set_result(message)
            case FirstToken():
                self._calls[message.request_id].first_token(message)
            case Finished():
                self._calls.pop(message.request_id).finished(message)
            case Steps():
                assert self._steps is not None
                self._steps.set_result(message)

    def _fail(self, error: FleetFailed) -> None:
        for future in (self._ready, self._steps, *(call.ended for call in self._calls.values())):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # as if it was looked at: nobody may wait for it yet, or any more
        self._calls.clear()


class _Call:
    """One request on its way."""

    def __init__(
        self, routing: Routing, work: WorkRequest, due_s: float, hashes: Sequence[BlockHash]
    ) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ttft_s = 0.0
        self.cached_tokens = 0
        self.replica_id = ReplicaId("")
        self._routing = routing
        self.work = work
        self.due_s = due_s
        self._hashes = hashes

    def first_token(self, message: FirstToken) -> None:
        self.ttft_s = time.monotonic() - self.due_s
        self.cached_tokens = message.cached_tokens
        self._routing.first_token(message.request_id, self.replica_id, message.cached_tokens)

    def finished(self, message: Finished) -> None:
        self._routing.finish(message.request_id, block_hashes=self._hashes, answers=(message.num_tokens,))
        if message.error or message.num_tokens != self.work.output_tokens:
            cause = message.error or f"{message.num_tokens} tokens instead of {self.work.output_tokens}"
            self.ended.set_exception(FleetFailed(f"request {message.request_id}: {cause}"))
        else:
            self.ended.set_result(None)


class _Copy:
    """A hot prefix on its way to one more replica. Nobody waits for it."""

    def __init__(self, routing: Routing, replica_id: ReplicaId) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._routing = routing
        self._replica_id = replica_id

    def first_token(self, message: FirstToken) -> None:
        self._routing.first_token(message.request_id, self._replica_id, message.cached_tokens)

    def finished(self, message: Finished) -> None:
        self._routing.release(message.request_id)


class _Router:
    def __init__(
        self,
        replicas: Mapping[ReplicaId, _Replica],
        policy: str,
        seed: int,
        salt: str,
        binding: str,
        place: tuple[int, int],
    ) -> None:
        """place: its rank among the routers, and their number."""
        some = next(iter(replicas.values()))
        config = RouterConfig(
            model_name="tiny",
            tokenizer="tiny",
            fingerprint=some.info.fingerprint,
            policy=policy,
            binding=binding,
            max_wait_s=None,  # every request is to be measured
        )
        self._replicas = replicas
        self.vocab_size = some.vocab_size
        self._salt = salt
        self._hasher = BlockHasher(some.info.fingerprint)
        # The simulated router's draws, so that both worlds draw alike.
        rng = random.Random(f"{seed} router {place[0]}")
        self._routing = Routing(config, rng=rng, peers=lambda: place)
        self._routing.make_copies(self._copy)
        self._placer = make_placer(config, self._routing, time.monotonic)
        self._waiting: set[asyncio.Task[None]] = set()
        self._events = SubscriberGroup(self._routing)
        self._routing.watch_membership(self._events.update)

    async def __aenter__(self) -> Self:
        self._routing.update_replicas({name: replica.info for name, replica in self._replicas.items()})
        while not self._events.all_synced():  # noqa: ASYNC110 - nobody tells when
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
        self._placer.close()
        await self._events.aclose()

    def take(self, number: int, work: WorkRequest, prompt: array[int], due_s: float) -> _Call:
        """A request that came at `due_s`."""
        request_id = RequestId(f"{self._salt} {number}")
        hashes = self._hasher.chain(self._hasher.root(salt=self._salt), prompt)
        query = RouteQuery(request_id, hashes, len(prompt), max_tokens=work.output_tokens, token_ids=prompt)
        call = _Call(self._routing, work, due_s, hashes)
        if isinstance(self._placer, PromptPlacer):
            self._send(self._placer.place_now(query), call, prompt)
        else:
            task = asyncio.get_running_loop().create_task(self._place(query, call, prompt))
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)
        return call

    async def _place(self, query: RouteQuery, call: _Call, prompt: array[int]) -> None:
        try:
            placement = await self._placer.place(query, since=call.due_s, deadline=None)
            self._send(placement, call, prompt)
        except Exception as error:  # nobody awaits this task: who waits for the call is told
            call.ended.set_exception(FleetFailed(f"request {query.request_id}: {error}"))

    def _send(self, placement: Placement, call: _Call, prompt: array[int]) -> None:
        call.replica_id = placement.replica_id
        self._replicas[placement.replica_id].send(
            self._request(placement, prompt, call.work.output_tokens), call
        )
        self._routing.routed(placement.request_id, placement.replica_id)

    def _copy(self, query: RouteQuery, placement: Placement) -> None:
        assert query.token_ids is not None
        request = replace(self._request(placement, query.token_ids, 1), for_cache=True)
        self._replicas[placement.replica_id].send(request, _Copy(self._routing, placement.replica_id))
        self._routing.routed(placement.request_id, placement.replica_id)

    def _request(self, placement: Placement, prompt: array[int], max_tokens: int) -> GenerateRequest:
        return GenerateRequest(
            request_id=placement.request_id,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            seed=0,
            cache_salt=self._salt,
            block_hashes=placement.block_hashes,
        )


async def _send(workload: Workload, routers: Sequence[_Router], rng: random.Random) -> list[_Call]:
    """Each request when it is due, to a router at random; until the last token of all. Raises FleetFailed."""
    vocab_size = routers[0].vocab_size
    prompts = [token_ids(work, workload.block_tokens, vocab_size) for work in workload.requests]
    calls: list[_Call] = []
    began_s = time.monotonic() + 0.1
    for number, (work, prompt) in enumerate(zip(workload.requests, prompts, strict=True)):
        due_s = began_s + work.arrival_s
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        calls.append(rng.choice(routers).take(number, work, prompt, due_s))
    ended = [call.ended for call in calls]
    done, waiting = await asyncio.wait(ended, timeout=END_TIMEOUT_S, return_when=asyncio.FIRST_EXCEPTION)
    for each in done:
        each.result()
    if waiting:
        told = counted(len(waiting), "request")
        raise FleetFailed(f"{told} had not ended {END_TIMEOUT_S:g} s after the last one came")
    return calls


def token_ids(work: WorkRequest, block_tokens: int, vocab_size: int) -> array[int]:
    """A prompt whose blocks are equal exactly where the workload's block ids are."""
    tokens: array[int] = array("i")
    for block_id in work.block_ids:
        draw = random.Random(block_id)
        tokens.extend(draw.randrange(vocab_size) for _ in range(block_tokens))
    return tokens[: work.input_tokens]
