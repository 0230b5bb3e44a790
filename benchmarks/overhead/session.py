"""One mode's measurements, in a process of its own: Ray reads its environment once.

`python -m benchmarks.overhead.session`, an `Order` as JSON on standard input; what it sees goes out as one
JSON object a line. Starts the server, joins its cluster for the direct calls, measures, stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from benchmarks.overhead import cells
from benchmarks.overhead.cells import STREAM_TOKENS, Cell, Plan
from benchmarks.overhead.http_client import BadAnswer, HttpConnection
from benchmarks.overhead.load import closed_loop
from benchmarks.overhead.modes import Mode
from benchmarks.overhead.processes import ServerProcesses, difference
from benchmarks.overhead.questions import Question, Questions
from benchmarks.overhead.samples import Idle, Run, Sample, Tokenizing
from benchmarks.overhead.server import Server, deploy_content
from cache.errors import ServingError
from cache.messages import GenerateRequest, ReplicaInfo
from deploy.ports import Ports, free_base

if TYPE_CHECKING:
    from router.dispatch.replica_calls import ReplicaCalls

CHAT_PATH = "/v1/chat/completions"
_SETTLE_S = 1.0  # after the server says it is ready, until what starting left to do is done
_WARM_UP_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Order:
    """What one session does."""

    mode: Mode
    plan: Plan
    step_s: float  # of the simulated engines
    replicas: int
    interval_s: float | None = None  # between two pieces of a stream; None = as shipped
    has_channel: bool = True  # False: pieces come to the Router as items of Ray's calls


Tell = Callable[[str, Any], None]
"""What kind of thing was seen ("run", "idle", "tokenizing", "doing"), and the thing."""


def run_session(order: Order, tell: Tell) -> None:
    """Raises ServerFailed, BadAnswer or LookupError when something cannot be measured."""
    with tempfile.TemporaryDirectory(prefix="wp", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder, ports = Path(name), Ports(free_base())  # short: Ray puts unix sockets below it
        os.environ.update(order.mode.environment(ports, folder))
        os.environ["RAY_TMPDIR"] = name
        # A token both sides know: Ray's own for local clusters stays with the process that made it.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        tell("doing", "starting")
        content = deploy_content(
            order.step_s, order.replicas, order.interval_s, has_channel=order.has_channel
        )
        server = Server(folder, ports.http, content, has_haproxy=order.mode.is_behind_haproxy)
        # What is left of a handle after this process has left the cluster must not start another one.
        os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
        try:
            with _joined(server.wait_until_ready()):
                time.sleep(_SETTLE_S)
                asyncio.run(_Session(order, server, tell).measure())
        except (BadAnswer, LookupError, ServingError) as error:
            error.add_note(server.last_words())  # why a process ended or refused is in there
            raise
        finally:
            server.stop()


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    """This process in the server's cluster, as a driver: its own CPU time is nobody's."""
    import ray

    ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


class _Session:
    def __init__(self, order: Order, server: Server, tell: Tell) -> None:
        self._order = order
        self._port = server.port
        self._processes = ServerProcesses.below(server.pid)
        self._tell = tell

    async def measure(self) -> None:
        """Everything, in the table's order."""
        from ray import serve

        from router.ingress import HandleCalls

        handle = serve.get_deployment_handle("Replica", "warmpath")
        description = await handle.options(method_name="describe").remote()
        known = {name: description[name] for name in ReplicaInfo.__dataclass_fields__}
        questions = Questions("tiny", ReplicaInfo.from_json(known).fingerprint)
        self._calls: ReplicaCalls = HandleCalls(handle)
        plan = self._order.plan
        await self._warm_up(questions)
        gc.collect()
        gc.freeze()
        self._tell("doing", "idle")
        await self._idle(plan.idle_s)
        for prompt in dict.fromkeys(cell.prompt for cell in plan.cells):
            self._tell("tokenizing", Tokenizing(prompt, questions.tokenizing_s(prompt)))
        for cell in plan.cells:
            for repeat in range(plan.repeats):
                self._tell("doing", cell.label)
                paths = (cells.Path.DIRECT, cells.Path.HTTP)
                for path in paths if repeat % 2 == 0 else reversed(paths):
                    asked = questions.of(cell, plan.num_requests(cell))
                    self._tell("run", await self._run(cell, path, asked))

    async def _warm_up(self, questions: Questions) -> None:
        """Every conversation into every cache; every process has done everything once."""
        self._tell("doing", "warming up")
        for prompt in dict.fromkeys(cell.prompt for cell in self._order.plan.cells):
            for _ in range(_WARM_UP_ROUNDS):
                for path in cells.Path:
                    cell = Cell(prompt, 4 * self._order.replicas, STREAM_TOKENS // 10)
                    await self._run(cell, path, questions.of(cell, 4 * cell.concurrency))

    async def _idle(self, seconds: float) -> None:
        before, began_s = self._processes.cpu_s(), time.perf_counter()
        await asyncio.sleep(seconds)
        used, passed_s = difference(self._processes.cpu_s(), before), time.perf_counter() - began_s
        self._tell("idle", Idle(self._order.mode, {part: used[part] / passed_s for part in used}))

    async def _run(self, cell: Cell, path: cells.Path, questions: list[Question]) -> Run:
        async with self._askers(cell.concurrency, path) as askers:
            before = self._processes.cpu_s()
            samples, wall_s = await closed_loop(askers, questions)
            cpu_s = difference(self._processes.cpu_s(), before)
        return Run(self._order.mode, cell, path, tuple(samples), wall_s, cpu_s)

    @contextlib.asynccontextmanager
    async def _askers(self, count: int, path: cells.Path) -> AsyncIterator[list[Any]]:
        if path is cells.Path.DIRECT:
            yield [self._ask_directly] * count
            return
        connections: list[HttpConnection] = []
        try:
            for _ in range(count):
                connections.append(await HttpConnection.open("127.0.0.1", self._port))  # noqa: PERF401
            yield [_asker(connection) for connection in connections]
        finally:
            for connection in connections:
                connection.close()

    async def _ask_directly(self, question: Question) -> Sample:
        return await ask_replica(self._calls, question.request)


async def ask_replica(calls: ReplicaCalls, request: GenerateRequest) -> Sample:
    """The Router's own call, without a Router."""
    began_s, first_s, num_pieces = time.perf_counter(), 0.0, 0
    async for delta in calls.generate(request):
        if not num_pieces:
            first_s = time.perf_counter() - began_s
        num_pieces += bool(delta.token_ids)
    return Sample(first_s, num_pieces)


def _asker(connection: HttpConnection) -> Any:
    async def ask(question: Question) -> Sample:
        return await connection.ask(CHAT_PATH, question.body)

    return ask


def _teller(out: TextIO) -> Tell:
    def tell(kind: str, content: Any) -> None:
        out.write(msgspec.json.encode([kind, content]).decode() + "\n")
        out.flush()

    return tell


def main() -> int:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray and Serve print to standard output what is not for our reader
    tell = _teller(out)
    # Whoever started this may end it: the server must not outlive it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        run_session(order, tell)
    except Exception as error:
        tell("failed", "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
