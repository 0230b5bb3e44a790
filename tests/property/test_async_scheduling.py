"""Laws of steps that are begun while the one before is computed: no answer changes, and no block is lost.

Over the simulated runner, whose pages betray any block that was handed out and never computed, or computed
from a token that was not the one drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.disciplines import PAGED
from cache.errors import ConfigError
from cache.events import StepTimeModel
from cache.host_tier import BlockMoves
from cache.messages import FinishReason, GenerateRequest
from cache.scheduling_order import SchedulingOrder
from cache.types import BlockHash, RequestId
from replica.config import SimConfig
from replica.engine.engine_core import EngineCore
from replica.errors import StepOutOfMemory, WaitTooLong
from replica.runners.sim_runner import SimRunner
from replica.runners.virtual_clock import VirtualClock
from replica.scheduling.request import RequestState
from replica.scheduling.runner import CopyTime, LaunchedStep, ScheduledSequence, StepResult
from tests.fakes.engine import BLOCK_SIZE, known_pace, make_request, sim_config, sim_core

ROOMY, TIGHT = 256, 12  # blocks: nothing is ever evicted; two or three requests fill it
EOS = frozenset({3})
# Another step costs next to nothing: they end early wherever they may.
CHEAP_STEPS = StepTimeModel(base_s=1e-5, per_token_s=1e-3, per_attention_s=0.0, per_sequence_s=0.0)


class Letters:
    """Tokens 0 to 3 as a to d: stop strings match by chance."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join("abcd"[token] for token in token_ids)


class Launching(SimRunner):
    """Checks what it is given; refuses steps beyond `most` tokens; its copies may fail."""

    def __init__(self, sim: SimConfig, clock: VirtualClock, **options: Any) -> None:
        super().__init__(
            sim, block_size=BLOCK_SIZE, sleep=clock.sleep, clock=clock, eos_token_ids=EOS, **options
        )
        self.most = 1 << 30
        self.fails_copies = False
        self.num_ahead = 0

    def launch(
        self, sequences: Sequence[ScheduledSequence], before: LaunchedStep | None = None
    ) -> LaunchedStep:
        assert sequences
        assert len({each.request_id for each in sequences}) == len(sequences)
        for each in sequences:
            assert len(each.block_table) * BLOCK_SIZE >= each.start + each.num_new_tokens
            assert len(set(each.block_table)) == len(each.block_table)
        self.num_ahead += before is not None
        step = super().launch(sequences, before)
        if sum(each.num_new_tokens for each in sequences) > self.most:
            step.failure = StepOutOfMemory(self.most, "OutOfMemoryError")  # type: ignore[attr-defined]
        return step

    def execute(self, sequences: list[ScheduledSequence]) -> StepResult:
        raise AssertionError("steps are launched here")

    def copy_blocks(self, moves: BlockMoves) -> Sequence[CopyTime]:
        if self.fails_copies:
            raise RuntimeError("a copy failed")
        return super().copy_blocks(moves)


@dataclass
class Workload:
    requests: list[GenerateRequest]
    arrivals: list[int]  # step before which each comes
    cancels: dict[str, int] = field(default_factory=dict)  # step before which it is cancelled
    settings: dict[str, Any] = field(default_factory=dict)
    raise_every_steps: int | None = None
    most_by_step: dict[int, int] = field(default_factory=dict)  # tokens that fit into memory, from then on
    failing_copies: frozenset[int] = frozenset()
    pace: StepTimeModel | None = None  # known from the first step on; None: measured


@st.composite
def workloads(draw: st.DrawFn, *, num_blocks: int, harm: bool) -> Workload:
    tokens, steps = st.integers(0, 3), st.integers(0, 40)
    shared = draw(st.lists(tokens, max_size=30))
    requests = []
    for index in range(draw(st.integers(1, 8))):
        prompt = [*shared[: draw(st.integers(0, 30))], *draw(st.lists(tokens, min_size=1, max_size=12))][:40]
        most = min(40, num_blocks * BLOCK_SIZE + 1 - len(prompt))
        max_tokens = draw(st.integers(1, most))
        request = make_request(
            f"r{index}",
            prompt,
            max_tokens=max_tokens,
            temperature=draw(st.sampled_from([0.0, 1.0])),
            seed=index,
            salt=draw(st.sampled_from(["", "other"])),
            stop=draw(st.sampled_from([(), (), ("ab",), ("ca", "bb")])),
            min_tokens=min(max_tokens, draw(st.sampled_from([0, 0, 5]))),
            ignore_eos=draw(st.booleans()),
            top_p=draw(st.sampled_from([1.0, 1.0, 1.0, 0.5])),
            deadline_s=draw(st.sampled_from([None, None, 0.02, 0.2])) if harm else None,
        )
        tenant, priority = draw(st.sampled_from(["", "", "other"])), draw(st.sampled_from([0, 0, -5]))
        requests.append(replace(request, tenant=tenant, priority=priority))
    host = draw(st.sampled_from([0.0, 40 * 8 * BLOCK_SIZE / (1 << 30)]))
    cancelled = draw(st.sets(st.sampled_from(requests).map(lambda r: r.request_id))) if harm else set()
    return Workload(
        requests,
        [draw(steps) for _ in requests],
        {request_id: draw(steps) for request_id in cancelled},
        {
            "max_wait_s": None,
            "max_batched_tokens": draw(st.integers(1, 40)),
            "max_running": draw(st.integers(1, 8)),
            "scheduling_order": draw(st.sampled_from(list(SchedulingOrder))).value,
            "itl_target_s": draw(st.sampled_from([math.inf, None, 0.003])),
            "prefix_caching": draw(st.booleans()),
            "cache_discipline": draw(st.sampled_from([kind.value for kind in PAGED])),
            "host_cache_gib": host,
            "preemption": draw(st.sampled_from(["recompute", "swap"])) if host else "recompute",
        },
        draw(st.sampled_from([None, 2, 5])) if harm else None,
        draw(st.dictionaries(steps, st.integers(1, 40), max_size=3)) if harm else {},
        draw(st.frozensets(steps, max_size=2)) if harm else frozenset(),
        draw(st.sampled_from([None, CHEAP_STEPS])),
    )


@dataclass
class Ended:
    """How requests ended: answer and reason, the error, or None for one that was cancelled in time."""

    by_id: dict[str, tuple[tuple[int, ...], str, FinishReason | None] | Exception | None]
    cached: set[BlockHash]


class Contents:
    """What a Router would think is cached."""

    def __init__(self) -> None:
        self.hashes: set[BlockHash] = set()

    def stored(self, block_hash: BlockHash) -> None:
        assert block_hash not in self.hashes
        self.hashes.add(block_hash)

    def removed(self, block_hash: BlockHash) -> None:
        self.hashes.remove(block_hash)

    def demoted(self, block_hash: BlockHash) -> None:
        self.removed(block_hash)

    def promoted(self, block_hash: BlockHash) -> None:
        self.stored(block_hash)

    def dropped(self, block_hash: BlockHash) -> None:
        assert block_hash not in self.hashes


def run(workload: Workload, num_blocks: int, *, ahead: bool) -> tuple[Ended, EngineCore]:
    with nullcontext() if workload.pace is None else known_pace(workload.pace):
        return run_at_its_pace(workload, num_blocks, ahead=ahead)


def run_at_its_pace(workload: Workload, num_blocks: int, *, ahead: bool) -> tuple[Ended, EngineCore]:
    clock, contents = VirtualClock(), Contents()
    sim = SimConfig(raise_every_steps=workload.raise_every_steps, vocab_size=4)
    config = sim_config(num_blocks, sim=sim, **workload.settings)
    if ahead:
        runner: SimRunner = Launching(config.sim, clock, host_cache_gib=config.host_cache_gib)
    else:
        runner = SimRunner(
            config.sim,
            block_size=BLOCK_SIZE,
            sleep=clock.sleep,
            clock=clock,
            eos_token_ids=EOS,
            host_cache_gib=config.host_cache_gib,
        )
    core = sim_core(
        num_blocks,
        runner=runner,
        clock=clock,
        sim=sim,
        decoder=Letters(),
        sink=contents,
        async_scheduling=ahead,
        **workload.settings,
    )
    ended = Ended({}, contents.hashes)
    step = 0
    while step <= 40 or core.has_work:
        harm(core, runner, workload, step, ended)
        for progress in core.step():
            if progress.is_last:
                done = progress.request
                assert done.request_id not in ended.by_id
                output = tuple(done.token_ids[done.num_prompt_tokens :])
                told = (output, done.detokenizer.take(), done.finish_reason)
                ended.by_id[done.request_id] = progress.error or told
        check_laws(core, num_blocks)
        step += 1
        assert step < 3000, "no progress"
    return ended, core


def harm(core: EngineCore, runner: SimRunner, workload: Workload, step: int, ended: Ended) -> None:
    for request, arrival in zip(workload.requests, workload.arrivals, strict=True):
        if arrival == step:
            try:
                core.submit(request)
            except WaitTooLong as refused:  # by its deadline
                ended.by_id[request.request_id] = refused
    for request_id, at in workload.cancels.items():
        if at == step and core.cancel(RequestId(request_id)) is not None:
            ended.by_id[request_id] = None
    if isinstance(runner, Launching):
        runner.most = workload.most_by_step.get(step, runner.most if step <= 40 else 1 << 30)
        runner.fails_copies = step in workload.failing_copies


def check_laws(core: EngineCore, num_blocks: int) -> None:
    cache = core.stats().cache
    assert cache.free + cache.used == cache.total == num_blocks
    running = [request for request in core.requests() if request.state is RequestState.RUNNING]
    if not running:
        assert cache.used == 0
    for request in running:
        # And what was taken for a step after one that was itself taken back: it is needed soon.
        held, most = len(request.blocks.block_table), -(-(len(request.token_ids) + 1) // BLOCK_SIZE)
        assert held <= most, "room for tokens that nobody is drawing"


def in_pool(core: EngineCore) -> set[BlockHash]:
    return {block.block_hash for block in core._cache.pool.blocks if block.block_hash is not None}


@given(workloads(num_blocks=ROOMY, harm=False))
@settings(max_examples=50)
def test_with_room_for_all_the_engine_ends_as_if_it_went_one_by_one(workload: Workload) -> None:
    """Answers, text, reasons; and what the cache holds, as Routers hear it."""
    alone, _ = run(workload, ROOMY, ahead=False)
    ended, core = run(workload, ROOMY, ahead=True)
    assert ended.by_id == alone.by_id
    assert ended.cached == alone.cached == in_pool(core)
    assert core.stats().cache.used == 0


@given(workloads(num_blocks=TIGHT, harm=False))
@settings(max_examples=50)
def test_preempted_and_evicted_they_still_say_the_same(workload: Workload) -> None:
    alone, _ = run(workload, TIGHT, ahead=False)
    ended, core = run(workload, TIGHT, ahead=True)
    assert ended.by_id == alone.by_id
    assert core.stats().cache.used == 0
    assert in_pool(core) == ended.cached


@given(workloads(num_blocks=TIGHT, harm=True))
@settings(max_examples=60)
def test_whatever_happens_who_answers_answers_right(workload: Workload) -> None:
    """Cancelled, too late, steps that fail, that do not fit into memory, copies that fail."""
    quiet = Workload(workload.requests, [0] * len(workload.requests), settings={"max_wait_s": None})
    quiet.requests = [make_quiet(request) for request in workload.requests]
    alone, _ = run(quiet, ROOMY, ahead=False)
    ended, core = run(workload, TIGHT, ahead=True)
    assert set(ended.by_id) == {request.request_id for request in workload.requests}
    for request_id, told in ended.by_id.items():
        if isinstance(told, tuple):
            assert told == alone.by_id[request_id]
    assert core.stats().cache.used == 0
    assert in_pool(core) == ended.cached


def make_quiet(request: GenerateRequest) -> GenerateRequest:
    return replace(request, deadline_s=None)


def crowd(num: int, **options: Any) -> list[GenerateRequest]:
    return [
        make_request(f"r{i}", [i % 4, 1, 2], max_tokens=30, ignore_eos=True, **options) for i in range(num)
    ]


def test_every_decode_step_is_begun_ahead() -> None:
    """But for the first one; blocks are opened and filled on the way. The last tokens are known as such."""
    workload = Workload(crowd(4), [0] * 4, settings={"max_wait_s": None})
    ended, core = run(workload, ROOMY, ahead=True)
    stats = core.stats()
    assert len(ended.by_id) == 4
    assert (stats.num_steps, stats.steps_ahead, stats.wasted_tokens) == (30, 29, 0)


def test_a_prompt_goes_on_beside_decodes() -> None:
    """Long ones in parts, each begun before the one before it is done; whoever waits gets what they leave."""
    requests = [make_request(f"r{i}", [i, 1] * 30, max_tokens=20, ignore_eos=True) for i in range(3)]
    workload = Workload(requests, [0, 3, 3], settings={"max_wait_s": None, "max_batched_tokens": 10})
    _, core = run(workload, ROOMY, ahead=True)
    stats = core.stats()
    assert stats.computed_tokens == 3 * (60 + 19)
    assert stats.steps_ahead > 0.8 * stats.num_steps


def test_whoever_waits_keeps_nobody_from_it() -> None:
    """Two of six run at a time: only a step after which a place is free is waited for."""
    workload = Workload(crowd(6), [0] * 6, settings={"max_wait_s": None, "max_running": 2})
    _, core = run(workload, ROOMY, ahead=True)
    stats = core.stats()
    assert stats.steps_ahead > 0.8 * stats.num_steps


def test_a_place_that_is_known_to_be_free_is_taken_at_once() -> None:
    """An answer's length ends it: whoever waits starts in the very next step, as if it went one by one."""
    requests = [make_request(f"r{i}", [i % 4, 1], max_tokens=5 + 4 * i, ignore_eos=True) for i in range(5)]
    workload = Workload(requests, [0] * 5, settings={"max_wait_s": None, "max_running": 2})
    alone, ahead = (run(workload, ROOMY, ahead=ahead)[1].stats() for ahead in (False, True))
    assert ahead.num_steps == alone.num_steps
    assert ahead.steps_ahead > 0.5 * ahead.num_steps


def test_a_stop_wastes_one_token() -> None:
    requests = [make_request(f"r{i}", [i, i], max_tokens=40, seed=i, temperature=1.0) for i in range(4)]
    workload = Workload(requests, [0] * 4, settings={"max_wait_s": None})
    ended, core = run(workload, ROOMY, ahead=True)
    stopped = [told for told in ended.by_id.values() if isinstance(told, tuple) and told[2] == "stop"]
    assert stopped
    assert core.stats().wasted_tokens == len(stopped)


def test_a_nucleus_keeps_nobody_from_being_begun() -> None:
    workload = Workload(crowd(3, top_p=0.5, temperature=1.0), [0] * 3, settings={"max_wait_s": None})
    _, core = run(workload, ROOMY, ahead=True)
    stats = core.stats()
    assert stats.steps_ahead == stats.num_steps - 1


@pytest.mark.parametrize(("ahead", "idle_s"), [(False, 0.004), (True, 0.0)])
def test_the_device_no_longer_waits_for_the_program(ahead: bool, idle_s: float) -> None:
    """4 ms of planning and sending a step, beside steps of more."""
    clock = VirtualClock()
    sim = SimConfig(base_s=0.01, vocab_size=4)
    config = sim_config(ROOMY, sim=sim)
    runner = SimRunner(config.sim, block_size=BLOCK_SIZE, sleep=clock.sleep, clock=clock)
    core = sim_core(ROOMY, runner=runner, clock=clock, sim=sim, async_scheduling=ahead)
    for request in crowd(4):
        core.submit(request)
    core.step()
    began_s, before = clock(), core.stats()
    busy_s = 0.0
    while core.has_work:
        clock.sleep(0.004)
        core.step()
    steps = core.stats().num_steps - before.num_steps
    busy_s = steps * config.sim.step_time.step_s(4, 0, 4)
    idle = (clock() - began_s - busy_s) / steps
    assert idle == pytest.approx(idle_s, abs=0.0005)


def test_a_runner_that_takes_no_step_ahead_is_refused() -> None:
    class OnlyExecutes:
        def __init__(self, runner: SimRunner) -> None:
            self.info, self.execute, self.copy_blocks = runner.info, runner.execute, runner.copy_blocks
            self.warm_up, self.close = runner.warm_up, runner.close

    runner: Any = OnlyExecutes(SimRunner(SimConfig(), block_size=BLOCK_SIZE))
    with pytest.raises(ConfigError, match="takes no step ahead"):
        sim_core(runner=runner, async_scheduling=True)
    assert sim_core(runner=runner).stats().steps_ahead == 0
