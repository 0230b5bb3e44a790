"""One real replica in a process of its own: production's engine, model and events, without Ray.

Several replicas on fewer cores would wait for each other, as replicas on machines of their own do not. So
each step may be *stretched*: it takes so many times the processor time that it used, asleep for the rest.
A fleet of n replicas stretched by s needs n / s cores, and its steps keep their own scatter.

    parent --GenerateRequest--> child     child --Ready, FirstToken, Finished, Steps--> parent

Knows the engine and a pipe; knows neither placement nor the simulation.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from cache.host_tier import BlockMoves
from cache.messages import GenerateRequest, ReplicaInfo
from cache.types import RequestId
from replica.config import ReplicaConfig
from replica.engine.engine import Engine
from replica.node import running_node
from replica.scheduling.runner import CopyTime, Runner, RunnerInfo, ScheduledSequence, StepResult
from replica.scheduling.step_time import StepWork, step_work


@dataclass(frozen=True, slots=True)
class Ready:
    info: ReplicaInfo
    vocab_size: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    request_id: RequestId
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: RequestId
    num_tokens: int
    error: str = ""  # what ended it instead of its last token


@dataclass(frozen=True, slots=True)
class Stretch:
    """Parent to child: from now on, steps take so many times their processor time."""

    factor: float


@dataclass(frozen=True, slots=True)
class TellSteps:
    """Parent to child: answer with `Steps`."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Parent to child: end."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step as it was."""

    work: StepWork
    used_s: float  # of a core
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Steps:
    """Every step since the last answer."""

    steps: tuple[Step, ...]


class StretchedRunner:
    """A `Runner` whose steps take `stretch` times their own processor time, or as long as they take."""

    def __init__(
        self,
        runner: Runner,
        *,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """used: seconds of a core that this thread has had."""
        self._runner = runner
        self._clock = clock
        self._used = used
        self._sleep = sleep
        # Both shared with the event loop, which replaces them whole.
        self.stretch = 1.0
        self.steps: list[Step] = []

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def copy_blocks(self, moves: BlockMoves) -> Sequence[CopyTime]:
        return self._runner.copy_blocks(moves)

    def execute(self, sequences: list[ScheduledSequence]) -> StepResult:
        began_s, used_before_s = self._clock(), self._used()
        result = self._runner.execute(sequences)
        used_s = self._used() - used_before_s
        self._sleep(max(0.0, began_s + self.stretch * used_s - self._clock()))
        elapsed_s = self._clock() - began_s
        self.steps.append(Step(step_work(sequences), used_s, elapsed_s))
        return replace(result, elapsed_s=elapsed_s)

    def warm_up(self) -> float:
        return self._runner.warm_up()

    def close(self) -> None:
        self._runner.close()


def serve(pipe: Connection, config: ReplicaConfig) -> None:
    """The process's main function: serve what comes through the pipe until it says `Stop` or closes."""
    os.environ["OMP_NUM_THREADS"] = "1"  # one thread a replica: its processor time is the engine thread's
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # of each replica's loading, across the parent's own
    with running_node(replace(config, torch_threads=1, event_port=0), wrap=StretchedRunner) as node:
        runner = node.assembly.runner
        assert isinstance(runner, StretchedRunner)
        pipe.send(Ready(node.info, runner.info.vocab_size))
        asyncio.run(_Service(node.engine, runner, pipe).run())


class _Service:
    def __init__(self, engine: Engine, runner: StretchedRunner, pipe: Connection) -> None:
        self._engine = engine
        self._runner = runner
        self._pipe = pipe

    async def run(self) -> None:
        async with asyncio.TaskGroup() as streams:
            async for message in _messages(self._pipe):
                match message:
                    case GenerateRequest():
                        streams.create_task(self._stream(message))
                    case Stretch():
                        self._runner.stretch = message.factor
                    case TellSteps():
                        steps, self._runner.steps = self._runner.steps, []
                        self._pipe.send(Steps(tuple(steps)))
                    case Stop():
                        return

    async def _stream(self, request: GenerateRequest) -> None:
        num_tokens = 0
        try:
            async with contextlib.aclosing(self._engine.generate(request)) as deltas:
                async for delta in deltas:
                    if not num_tokens:
                        self._pipe.send(FirstToken(request.request_id, delta.cached_tokens))
                    num_tokens += len(delta.token_ids)
        except Exception as error:  # to be told there: here nobody reads it
            self._pipe.send(Finished(request.request_id, num_tokens, f"{type(error).__name__}: {error}"))
        else:
            self._pipe.send(Finished(request.request_id, num_tokens))


async def _messages(pipe: Connection) -> AsyncIterator[object]:
    """What comes through the pipe, without blocking the event loop; ends when the other side is gone."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), readable.set)
    try:
        while True:
            await readable.wait()
            readable.clear()
            while pipe.poll():
                yield pipe.recv()
    except (EOFError, ConnectionResetError):
        return
    finally:
        loop.remove_reader(pipe.fileno())
