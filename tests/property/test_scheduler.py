"""The scheduler's laws over random workloads on the simulated runner, whose pages betray any wrong block."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.disciplines import PAGED
from cache.messages import GenerateRequest
from cache.scheduling_order import SchedulingOrder
from cache.types import RequestId
from replica.config import SimConfig
from replica.engine.engine_core import EngineCore
from replica.errors import DeadlineExceeded, ForwardFailed, WaitTooLong
from replica.runners.sim_runner import SimRunner
from replica.scheduling.request import RequestState
from replica.scheduling.runner import ScheduledSequence, StepResult
from tests.fakes.engine import BLOCK_SIZE, VirtualClock, known_pace, make_request, sim_config, sim_core

NUM_BLOCKS = 12  # 48 tokens: two or three of the requests below fill it


class RecordingRunner(SimRunner):
    """Remembers the size of every step and that no step lists a request twice, or leaves a layer out."""

    def __init__(self, config: SimConfig, clock: VirtualClock, num_layers: int = 1) -> None:
        super().__init__(config, block_size=BLOCK_SIZE, sleep=clock.sleep, num_layers=num_layers)
        self.step_tokens: list[int] = []
        self.step_sequences: list[int] = []
        self.num_spans = 0
        self._halfway: tuple[str, int, int, int] | None = None  # request, start, tokens, layers behind it

    def execute(self, sequences: list[ScheduledSequence]) -> StepResult:
        assert len({s.request_id for s in sequences}) == len(sequences)
        for s in sequences:
            assert len(s.block_table) * BLOCK_SIZE >= s.start + s.num_new_tokens
        assert all(s.layers is None for s in sequences[:-1])
        if (span := sequences[-1].layers) is not None:
            last = sequences[-1]
            part = (last.request_id, last.start, last.num_new_tokens)
            assert span.first == 0 or self._halfway == (*part, span.first)
            assert 0 <= span.first < span.end <= span.total == self.info.num_layers
            assert all(s.num_new_tokens == 1 for s in sequences[:-1])
            assert len(sequences) > 1
            assert last.num_new_tokens > 1
            self._halfway = (*part, span.end)
            self.num_spans += 1
        self.step_tokens.append(sum(s.num_new_tokens for s in sequences))
        self.step_sequences.append(len(sequences))
        return super().execute(sequences)


@dataclass
class Workload:
    requests: list[GenerateRequest]
    arrivals: list[int]  # step before which each request comes
    cancels: dict[str, int] = field(default_factory=dict)  # step before which a request is cancelled
    settings: dict[str, Any] = field(default_factory=dict)
    raise_every_steps: int | None = None
    taught: int = 0  # length of the answers that it has seen before: longer ones then come as a surprise
    num_layers: int = 1

    @property
    def order(self) -> SchedulingOrder:
        return SchedulingOrder(self.settings["scheduling_order"])


@st.composite
def workloads(draw: st.DrawFn, *, faults: bool) -> Workload:
    tokens = st.integers(0, 3)  # few values: prefixes meet by chance, blocks within one sequence too
    shared = draw(st.lists(tokens, min_size=0, max_size=30))
    requests = []
    for index in range(draw(st.integers(1, 8))):
        prompt = [*shared[: draw(st.integers(0, 30))], *draw(st.lists(tokens, min_size=1, max_size=12))][:40]
        requests.append(
            make_request(
                f"r{index}",
                prompt,
                max_tokens=draw(st.integers(1, NUM_BLOCKS * BLOCK_SIZE + 1 - len(prompt))),
                temperature=draw(st.sampled_from([0.0, 1.0])),
                seed=index,
                salt=draw(st.sampled_from(["", "other"])),
                deadline_s=draw(st.sampled_from([None, None, 0.02, 0.2])) if faults else None,
            )
        )
    steps = st.integers(0, 40)
    cancelled = draw(st.sets(st.sampled_from(requests).map(lambda r: r.request_id))) if faults else set()
    return Workload(
        requests=requests,
        arrivals=[draw(steps) for _ in requests],
        cancels={request_id: draw(steps) for request_id in cancelled},
        settings={
            "max_wait_s": None,  # nobody is refused here: everybody comes at once
            "max_batched_tokens": draw(st.integers(1, 40)),
            "max_running": draw(st.integers(1, 8)),
            "prefix_caching": draw(st.booleans()),
            "cache_discipline": draw(st.sampled_from([kind.value for kind in PAGED])),
            "itl_target_s": draw(st.sampled_from([math.inf, None, 0.001])),
            "scheduling_order": draw(st.sampled_from(list(SchedulingOrder))).value,
        },
        raise_every_steps=draw(st.sampled_from([None, 2, 5])) if faults else None,
        taught=draw(st.integers(0, 20)),
        num_layers=draw(st.sampled_from([1, 3, 8])),
    )


def build(workload: Workload) -> tuple[EngineCore, RecordingRunner]:
    clock = VirtualClock()
    sim = SimConfig(raise_every_steps=workload.raise_every_steps, vocab_size=4)
    config = sim_config(NUM_BLOCKS, sim=sim, **workload.settings)
    runner = RecordingRunner(config.sim, clock, workload.num_layers)
    # Known from the first step on, and every step of decodes is over the limit, if there is one.
    with known_pace():
        core = sim_core(NUM_BLOCKS, runner=runner, clock=clock, sim=sim, **workload.settings)
    if workload.taught and workload.raise_every_steps is None:
        core.complete([make_request("before", [3], max_tokens=workload.taught)])
    return core, runner


def drive(core: EngineCore, workload: Workload) -> dict[str, tuple[int, ...] | Exception | None]:
    """Run to the end: each request's output, its error, or None if it was cancelled in time."""
    ended: dict[str, tuple[int, ...] | Exception | None] = {}
    step = 0
    while step <= 40 or core.has_work:
        for request, arrival in zip(workload.requests, workload.arrivals, strict=True):
            if arrival == step:
                try:
                    core.submit(request)
                except WaitTooLong as error:  # for its deadline
                    ended[request.request_id] = error
        for request_id, at in workload.cancels.items():
            if at == step and core.cancel(RequestId(request_id)) is not None:
                ended[request_id] = None
        oldest = next(iter(core.requests()), None)
        preempted = oldest.num_preemptions if oldest else 0
        moved = core.step()
        if oldest is not None and workload.order is SchedulingOrder.FIRST_COME:
            # It moves forward in every step, or ends.
            assert oldest.num_preemptions == preempted
            assert oldest.state is not RequestState.WAITING
        for progress in moved:
            if progress.is_last:
                done = progress.request
                assert done.request_id not in ended
                assert done.state is RequestState.FINISHED
                output = tuple(done.token_ids[done.num_prompt_tokens :])
                ended[done.request_id] = progress.error or output
        check_laws(core, workload)
        step += 1
        assert step < 3000, "no progress"
    return ended


def check_laws(core: EngineCore, workload: Workload) -> None:
    stats, load = core.stats(), core.load()
    assert stats.cache.free + stats.cache.used == stats.cache.total == NUM_BLOCKS
    assert load.free_blocks == stats.cache.free
    assert load.num_running <= workload.settings["max_running"]
    if load.num_running == 0:
        assert stats.cache.used == 0
    waiting = [r for r in core.requests() if r.state is RequestState.WAITING]
    running = [r for r in core.requests() if r.state is RequestState.RUNNING]
    assert (len(waiting), len(running)) == (load.num_waiting, load.num_running)
    if workload.order is SchedulingOrder.FIRST_COME:  # else one that has begun may not be the last
        assert all(r.is_decoding for r in running[:-1])  # so decodes come before chunks
    assert all(not r.blocks.block_table and r.num_computed == 0 for r in waiting)
    for request in running:
        request.growth = None
    assert core.load().growth_blocks == load.growth_blocks  # found anew, as it was remembered


def alone(request: GenerateRequest) -> tuple[int, ...]:
    sim = SimConfig(vocab_size=4)
    whole = sim_core(64, sim=sim, prefix_caching=False, max_batched_tokens=512)
    bare = make_request(
        request.request_id,
        request.token_ids,
        max_tokens=request.sampling.max_tokens,
        temperature=request.sampling.temperature,
        seed=request.seed,
    )
    return whole.complete([bare])[0].token_ids


def steps_keep_to_the_budget(runner: RecordingRunner, workload: Workload) -> bool:
    """Of prompts they have no more tokens, and one for each of the others."""
    budget = workload.settings["max_batched_tokens"]
    steps = zip(runner.step_tokens, runner.step_sequences, strict=True)
    return all(tokens < budget + sequences for tokens, sequences in steps)


@given(workloads(faults=False))
@settings(max_examples=80)
def test_every_request_ends_as_if_it_had_run_alone(workload: Workload) -> None:
    """Whatever shares its steps, its blocks, or throws it out of the pool."""
    core, runner = build(workload)
    ended = drive(core, workload)
    assert ended == {request.request_id: alone(request) for request in workload.requests}
    assert core.stats().cache.free == NUM_BLOCKS
    assert steps_keep_to_the_budget(runner, workload)
    assert max(runner.step_sequences) <= workload.settings["max_running"]


def test_workloads_send_parts_through_the_layers() -> None:
    """Or the laws above would say nothing of it."""
    prompts = [make_request(f"r{i}", [i] * 10, max_tokens=1) for i in range(1, 4)]
    requests = [make_request("reader", [0] * 4, max_tokens=30), *prompts]
    settings = {"max_wait_s": None, "max_batched_tokens": 40, "max_running": 8, "itl_target_s": 0.001}
    settings["scheduling_order"] = SchedulingOrder.SHORTEST_PREEMPTING.value
    workload = Workload(requests, [0, 2, 2, 2], settings=settings, num_layers=3)
    core, runner = build(workload)
    drive(core, workload)
    assert runner.num_spans > 10


@given(workloads(faults=True))
@settings(max_examples=80)
def test_faults_cancellations_and_deadlines_touch_only_their_own(workload: Workload) -> None:
    """Each request ends once: right tokens, its own error, or silence because it was cancelled."""
    core, runner = build(workload)
    ended = drive(core, workload)
    assert core.stats().cache.free == NUM_BLOCKS
    assert steps_keep_to_the_budget(runner, workload)
    for request in workload.requests:
        outcome = ended[request.request_id]
        if isinstance(outcome, tuple):
            assert outcome == alone(request)
        elif outcome is None:
            assert request.request_id in workload.cancels
        else:
            is_late = isinstance(outcome, (DeadlineExceeded, WaitTooLong)) and request.deadline_s is not None
            assert is_late or (isinstance(outcome, ForwardFailed) and workload.raise_every_steps)
