"""Laws of several answers to one prompt: each is the one it would be alone, and the prompt is computed once.

On the simulated runner, whose pages betray a block that was shared too far, copied too late or written twice.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.disciplines import PAGED
from cache.events import StepTimeModel
from cache.messages import AnswerSoFar, GenerateRequest
from cache.types import RequestId
from replica.config import SimConfig
from replica.engine.answers import answer_seed
from replica.engine.engine_core import EngineCore
from replica.runners.sim_runner import SimRunner
from replica.scheduling.runner import ScheduledSequence, StepResult
from tests.fakes.engine import BLOCK_SIZE, VirtualClock, known_pace, make_request, run, sim_config, sim_core

VOCABULARY = 4
NUM_BLOCKS = 14


class Guarded(SimRunner):
    """Refuses to write where somebody else reads, and to copy from where nothing was written."""

    def execute(self, sequences: list[ScheduledSequence]) -> StepResult:
        for one in sequences:
            # What it begins in this step, twins may read: it is computed before they are.
            continued = one.block_table[one.start // BLOCK_SIZE] if one.start % BLOCK_SIZE else None
            for other in sequences:
                if other is not one:
                    assert continued not in other.block_table, "a block that another holds is written"
            if one.copy_source is not None:
                assert one.copy_source not in one.block_table
                assert one.start % BLOCK_SIZE
        return super().execute(sequences)


def build(num_blocks: int = NUM_BLOCKS, **options: Any) -> EngineCore:
    clock, sim = VirtualClock(), SimConfig(vocab_size=VOCABULARY)
    config = sim_config(num_blocks, sim=sim, **options)
    runner = Guarded(config.sim, block_size=BLOCK_SIZE, sleep=clock.sleep)
    return sim_core(num_blocks, runner=runner, clock=clock, sim=sim, **options)


def alone(request: GenerateRequest, choice: int) -> tuple[int, ...]:
    core = build(64, prefix_caching=False, max_batched_tokens=512)
    bare = replace(request, n=1, answers=(), deadline_s=None, seed=answer_seed(request.seed, choice))
    return core.complete([bare])[0].token_ids


@dataclass
class Workload:
    requests: list[GenerateRequest]
    arrivals: list[int]
    cancels: dict[str, int]  # request id, before which step all its answers are dropped
    options: dict[str, Any]


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    shared = draw(st.lists(st.integers(0, 3), max_size=16))
    requests = []
    for index in range(draw(st.integers(1, 4))):
        own = draw(st.lists(st.integers(0, 3), min_size=1, max_size=10))
        prompt = [*shared[: draw(st.integers(0, 16))], *own]
        most = min(20, NUM_BLOCKS * BLOCK_SIZE + 1 - len(prompt))
        request = make_request(
            f"r{index}", prompt, max_tokens=draw(st.integers(1, most)), temperature=1.0, seed=index
        )
        requests.append(replace(request, n=draw(st.integers(1, 5))))
    steps = st.integers(0, 30)
    cancelled = draw(st.sets(st.sampled_from(requests).map(lambda r: r.request_id), max_size=1))
    return Workload(
        requests,
        [draw(steps) for _ in requests],
        {request_id: draw(steps) for request_id in cancelled},
        {
            "max_wait_s": None,
            "max_batched_tokens": draw(st.integers(1, 30)),
            "max_running": draw(st.integers(1, 8)),
            "prefix_caching": draw(st.booleans()),
            "cache_discipline": draw(st.sampled_from([kind.value for kind in PAGED])),
        },
    )


@given(workloads())
@settings(max_examples=100)
def test_every_answer_is_the_one_it_would_be_alone(workload: Workload) -> None:
    """In any company, thrown out and back alone, with a prefix cache or without; and no block is lost."""
    core = build(**workload.options)
    ended: dict[tuple[str, int], tuple[int, ...]] = {}
    gone: set[str] = set()
    step = 0
    while step <= 30 or core.has_work:
        for request, arrival in zip(workload.requests, workload.arrivals, strict=True):
            if arrival == step:
                core.take(request)
        for request_id, at in workload.cancels.items():
            if at == step:
                mine = [r for r in core.requests() if r.request_id.split("/")[0] == request_id]
                gone |= {request_id} if mine else set()
                for one in mine:
                    core.cancel(one.request_id)
        for progress in core.step():
            assert progress.error is None
            if progress.is_last:
                done = progress.request
                name = (done.request_id.split("/")[0], done.choice)
                assert name not in ended
                ended[name] = tuple(done.token_ids[done.num_prompt_tokens :])
        stats, load = core.stats(), core.load()
        assert load.num_running <= workload.options["max_running"]
        assert load.num_running + load.num_waiting == len(list(core.requests()))
        assert load.num_running or not stats.cache.used
        step += 1
        assert step < 3000, "no progress"
    assert core.stats().cache.free == NUM_BLOCKS
    for request in workload.requests:
        for choice in range(request.n):
            if request.request_id not in gone:
                assert ended[request.request_id, choice] == alone(request, choice)


@given(st.integers(1, 40), st.integers(1, 8), st.booleans())
def test_the_prompt_is_computed_once(num_prompt: int, n: int, prefix_caching: bool) -> None:
    """And its last token once for each answer, whose first token is drawn there."""
    core = build(200, prefix_caching=prefix_caching, max_batched_tokens=64)
    request = make_request("r", [i % 4 for i in range(num_prompt)], max_tokens=1, temperature=1.0)
    completions = core.complete([replace(request, n=n)])
    assert len(completions) == n
    if num_prompt > 1:
        assert core.stats().computed_tokens == num_prompt + n - 1


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_of_answers_that_find_no_place_as_much_is_told_as_is_computed(
    num_prompt: int, n: int, places: int, prefix_caching: bool
) -> None:
    core = build(200, prefix_caching=prefix_caching, max_batched_tokens=64, max_running=places)
    request = make_request("r", [i % 4 for i in range(num_prompt)], max_tokens=1, temperature=1.0)
    core.take(replace(request, n=n))
    core.step()
    load, computed = core.load(), core.stats().computed_tokens
    run(core)
    assert core.stats().computed_tokens - computed == load.queued_uncached_tokens + load.num_running


# Steps with room for all answers: whoever finds no place in them computes what no full block holds once more.
@given(st.integers(1, 60), st.integers(1, 8), st.integers(8, 30), st.floats(0.001, 0.5), st.booleans())
def test_none_is_told_to_go_whose_prompt_is_begun_at_once(
    num_prompt: int, n: int, step_tokens: int, max_wait_s: float, has_deadline: bool
) -> None:
    """However long the prompt takes; where there is a deadline, it leaves time for it, and little else."""
    pace = StepTimeModel(base_s=0.1, per_token_s=0.0, per_attention_s=0.0, per_sequence_s=0.0)
    options = {"max_batched_tokens": step_tokens, "max_wait_s": max_wait_s}
    with known_pace(pace):
        core = sim_core(200, sim=SimConfig(**msgspec.structs.asdict(pace)), **options)
    deadline_s = pace.prefill_s(num_prompt, 0, step_tokens) + 0.1 * (n + 2) if has_deadline else None
    request = make_request("r", [i % 4 for i in range(num_prompt)], max_tokens=1, deadline_s=deadline_s)
    assert len(core.complete([replace(request, n=n)])) == n


@given(st.integers(2, 20), st.integers(2, 5), st.integers(1, 12), st.data())
@settings(max_examples=60)
def test_each_answer_goes_on_from_where_an_earlier_attempt_left_it(
    num_prompt: int, n: int, max_tokens: int, data: st.DataObject
) -> None:
    """Some have not begun, some are over, and all are as if nothing had happened."""
    request = make_request("r", [i % 4 for i in range(num_prompt)], max_tokens=max_tokens, temperature=1.0)
    request = replace(request, n=n)
    whole = [alone(request, choice) for choice in range(n)]
    lengths = [data.draw(st.integers(0, max_tokens)) for _ in range(n)]
    so_far = tuple(
        AnswerSoFar(array("i", tokens[:length]), 0, is_over=length == max_tokens)
        for tokens, length in zip(whole, lengths, strict=True)
    )
    left = [choice for choice in range(n) if lengths[choice] < max_tokens]
    if not left:
        return
    completions = build(200).complete([replace(request, answers=so_far, attempt=1)])
    assert [completion.token_ids for completion in completions] == [whole[choice] for choice in left]


def test_the_first_answer_is_that_of_one() -> None:
    request = make_request("r", [1, 2, 3, 0, 1], max_tokens=12, temperature=1.0, seed=5)
    one = build(64).complete([request])[0]
    several = build(64).complete([replace(request, n=4)])
    assert several[0].token_ids == one.token_ids
    assert len({completion.token_ids for completion in several}) == 4
    assert [several[i].request_id for i in range(2)] == [RequestId("r"), RequestId("r/1")]
