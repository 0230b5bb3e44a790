"""Scheduling by hand: small workloads whose every step can be said in advance."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache.types import RequestId
from replica.config import SimConfig
from replica.engine.engine_core import EngineCore, Progress
from replica.errors import (
    DeadlineExceeded,
    ForwardFailed,
    NeverBegan,
    PromptTooLong,
    QueueFull,
    RefusedEverywhere,
    RequestRefused,
    TooLargeForCache,
    WaitTooLong,
)
from replica.runners.sim_runner import SimRunner
from replica.scheduling.runner import ScheduledSequence, StepResult
from tests.fakes.engine import (
    BLOCK_SIZE,
    VirtualClock,
    expect_short_answers,
    make_request,
    run,
    sim_config,
    sim_core,
)


class Tape(SimRunner):
    """Writes down each step as {request id: new tokens}."""

    def __init__(self, num_blocks: int = 64, clock: VirtualClock | None = None) -> None:
        config = sim_config(num_blocks).sim
        super().__init__(config, block_size=BLOCK_SIZE, sleep=(clock or VirtualClock()).sleep)
        self.steps: list[dict[str, int]] = []
        self.tables: dict[str, list[int]] = {}

    def execute(self, sequences: list[ScheduledSequence]) -> StepResult:
        self.steps.append({s.request_id: s.num_new_tokens for s in sequences})
        self.tables |= {s.request_id: list(s.block_table) for s in sequences}
        return super().execute(sequences)


def test_decodes_are_never_starved_by_a_long_prompt() -> None:
    """The prompt gets what the decodes leave of the budget, step after step."""
    tape = Tape()
    core = sim_core(runner=tape, max_batched_tokens=10)
    core.submit(make_request("long", range(100, 140), max_tokens=2))
    core.submit(make_request("short", [1, 2, 3], max_tokens=20))
    run(core)
    # All of the budget while nobody decodes; then one token less per decode.
    assert tape.steps[:6] == [
        {"long": 10},
        {"long": 10},
        {"long": 10},
        {"long": 10},
        {"long": 1, "short": 3},
        {"short": 1},
    ]
    tape = Tape()
    core = sim_core(runner=tape, max_batched_tokens=10)
    core.submit(make_request("short", [1, 2, 3], max_tokens=20))
    core.step()
    core.submit(make_request("long", range(100, 140), max_tokens=2))
    run(core)
    assert tape.steps[1:6] == [
        {"short": 1, "long": 9},
        {"short": 1, "long": 9},
        {"short": 1, "long": 9},
        {"short": 1, "long": 9},
        {"short": 1, "long": 4},
    ]


def test_a_prompt_that_would_fit_without_the_decodes_ends_beside_them() -> None:
    """Not with what they would leave over for a step of its own."""
    tape = Tape()
    core = sim_core(runner=tape, max_batched_tokens=10)
    for index in range(4):
        core.submit(make_request(f"r{index}", range(10 * index, 10 * index + 5), max_tokens=3))
    core.submit(make_request("long", range(100, 111), max_tokens=1))
    run(core)
    assert tape.steps == [
        {"r0": 5, "r1": 5},
        {"r0": 1, "r1": 1, "r2": 5, "r3": 5},
        {"r0": 1, "r1": 1, "r2": 1, "r3": 1, "long": 6},  # one more than would fit without them
        {"r2": 1, "r3": 1, "long": 5},
    ]


def test_twins_in_one_step_share_their_blocks() -> None:
    """The second of two equal prompts hits what the first is computing in the same step."""
    tape = Tape()
    core = sim_core(runner=tape)
    prompt = list(range(18))
    core.submit(make_request("a", prompt, max_tokens=3))
    core.submit(make_request("b", prompt, max_tokens=3))
    core.step()
    assert tape.steps == [{"a": 18, "b": 2}]
    assert tape.tables["a"][:4] == tape.tables["b"][:4]
    assert tape.tables["a"][4] != tape.tables["b"][4]
    first, second = core.requests()
    assert first.token_ids == second.token_ids
    assert (first.cached_tokens, second.cached_tokens) == (0, 16)


def test_admission_counts_uncached_blocks_only() -> None:
    """A long prompt that is nearly all in use by another fits into the few blocks left."""
    core = sim_core(num_blocks=7)
    core.submit(make_request("holder", range(17), max_tokens=8))  # 5 blocks, 6 in the end
    core.step()
    core.submit(make_request("guest", [*range(16), 99], max_tokens=1))  # 4 of them, 1 of its own
    core.step()
    assert core.load().num_running + core.stats().output_tokens == 1 + 3  # the guest had its token


def test_idle_hit_blocks_are_not_free() -> None:
    """Blocks that a hit takes out of the free queue cannot be handed out a second time."""
    core = sim_core(num_blocks=6)
    core.complete([make_request("first", range(16), max_tokens=1)])  # leaves 4 cached blocks, idle
    core.submit(make_request("holder", range(100, 112), max_tokens=4))  # 3 of the 6: 2 never used, 1 cached
    core.step()
    assert core.load().free_blocks == 3
    core.submit(make_request("again", [*range(16), *range(50, 54)], max_tokens=1))
    core.step()
    assert core.load().num_waiting == 1


def test_preempted_request_has_the_output_of_an_undisturbed_one() -> None:
    """Newest first out, state cleared, and back with a prefix hit on its own blocks."""
    requests = [make_request(f"r{i}", range(10 * i, 10 * i + 10), max_tokens=16) for i in range(3)]
    tight = sim_core(num_blocks=10)
    expect_short_answers(tight)
    completions = tight.complete(requests)
    assert sum(c.num_preemptions for c in completions) == tight.stats().preemptions > 0
    assert completions[0].num_preemptions == 0  # the oldest never
    for request, completion in zip(requests, completions, strict=True):
        assert completion.token_ids == sim_core().complete([request])[0].token_ids
        assert completion.cached_tokens == 0  # what it hit when it came back is not the client's hit


def test_half_prefilled_requests_that_fill_the_pool_do_not_lock_up() -> None:
    """Chunks of several prompts can take every block; the youngest then give theirs back."""
    core = sim_core(num_blocks=8, max_batched_tokens=12)
    requests = [make_request(f"r{i}", range(40 * i, 40 * i + 28), max_tokens=4) for i in range(4)]
    assert len(core.complete(requests)) == 4


def test_a_request_as_large_as_the_pool_finishes() -> None:
    core = sim_core(num_blocks=4)
    assert len(core.complete([make_request("all", range(10), max_tokens=7)])[0].token_ids) == 7


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
def test_cancelling_frees_the_blocks(when: str) -> None:
    """At any point, and the neighbour does not notice."""
    core = sim_core(num_blocks=16, max_batched_tokens=16)
    neighbour = make_request("neighbour", [7, 8, 9], max_tokens=12)
    core.submit(neighbour)
    core.step()
    core.submit(make_request("victim", range(20), max_tokens=10))
    for _ in range({"waiting": 0, "prefill": 1, "decode": 3}[when]):
        core.step()
    assert core.load().num_running == (1 if when == "waiting" else 2)
    victim = core.cancel(RequestId("victim"))
    assert victim is not None
    assert victim.num_output_tokens == (2 if when == "decode" else 0)
    assert core.cancel(RequestId("victim")) is None
    [left] = core.requests()
    assert core.stats().cache.used == len(left.blocks.block_table)
    run(core)
    assert core.stats().cache.free == 16
    assert left.token_ids[3:].tolist() == list(sim_core().complete([neighbour])[0].token_ids)


def test_deadline_ends_a_request_waiting_or_running() -> None:
    clock = VirtualClock()
    core = sim_core(clock=clock, max_running=1)
    core.submit(make_request("running", range(8), max_tokens=50, deadline_s=1.0))
    core.submit(make_request("waiting", range(8), max_tokens=50, deadline_s=0.5), arrival_s=-0.25)
    core.step()
    clock.now_s = 0.25
    [late] = [p for p in core.step() if p.error is not None]
    assert late.request.request_id == "waiting"
    assert isinstance(late.error, DeadlineExceeded)
    assert (late.error.deadline_s, late.error.waited_s) == (0.5, 0.5)
    clock.now_s = 1.0
    [late] = core.step()
    assert (late.request.request_id, type(late.error)) == ("running", DeadlineExceeded)
    assert core.stats().cache.free == 64


def test_queue_full_names_both_numbers() -> None:
    core = sim_core(max_waiting=2)
    for i in range(2):
        core.submit(make_request(f"r{i}", [i]))
    with pytest.raises(QueueFull) as caught:
        core.submit(make_request("r2", [2]))
    assert (caught.value.waiting, caught.value.limit) == (2, 2)
    core.step()  # both run now, nobody waits
    core.submit(make_request("r2", [2]))


def test_the_queue_is_bounded_by_time_too() -> None:
    """Unmeasured: 256 full steps of 4 tokens count as the longest wait. Somebody has to wait first."""
    core = sim_core(1000, max_wait_s=1.0, max_batched_tokens=4)
    core.submit(make_request("alone, however long", [1] * 1500))
    with pytest.raises(WaitTooLong) as caught:
        core.submit(make_request("behind it", range(4)))
    assert caught.value.wait_s == pytest.approx(1500 / 1024)
    core.submit(replace(make_request("waited elsewhere", range(4)), attempt=1))


def test_measured_the_queue_is_bounded_by_what_it_takes() -> None:
    """Steps of 10 ms and 1 ms a token, eight tokens a step: 2.25 s for a thousand."""
    sim = SimConfig(base_s=0.01, per_token_s=0.001, per_attention_s=0.0, per_sequence_s=0.0)
    core = sim_core(1000, sim=sim, max_wait_s=1.7, max_batched_tokens=8)
    for i in range(12):  # what it learns from
        core.submit(make_request(f"r{i}", range(50 * i, 50 * i + 20)))
        while core.has_work:
            core.step()
    assert core.load().step_time is not None
    core.submit(make_request("first", range(500), salt="first"))
    core.submit(make_request("second", range(300), salt="second"))
    with pytest.raises(WaitTooLong) as caught:
        core.submit(make_request("third", [1]))
    assert caught.value.wait_s == pytest.approx(800 * 0.001 + 100 * 0.01, rel=0.02)


class TestWhoNeverBegins:
    """Steps of 100 ms. One needs all blocks for its prompt and seven tokens: who comes waits for its end."""

    SIM = SimConfig(base_s=0.1, per_token_s=0.0, per_attention_s=0.0, per_sequence_s=0.0)

    def taken(self, max_wait_s: float | None) -> EngineCore:
        core = sim_core(16, sim=self.SIM, max_wait_s=max_wait_s)
        core.submit(make_request("all blocks", range(100, 158), max_tokens=7))
        core.step()
        return core

    def errors(self, core: EngineCore) -> list[Progress]:
        """Of all that are told one, until nobody is left."""
        told = [each for _ in range(200) for each in core.step() if each.error is not None]
        assert not core.has_work
        return told

    def test_it_is_told_to_go_after_twice_what_it_may_wait(self) -> None:
        core = self.taken(max_wait_s=0.09)
        core.submit(make_request("short", [5, 6, 7], max_tokens=1))
        (told,) = self.errors(core)
        assert isinstance(told.error, NeverBegan)
        assert (told.request.request_id, told.error.limit_s) == ("short", 0.18)
        assert told.error.waited_s == pytest.approx(0.2), "in the first step after 0.18 s"
        assert core.stats().output_tokens == 7

    def test_each_answer_of_several_is_told(self) -> None:
        core = self.taken(max_wait_s=0.1)
        core.take(replace(make_request("two", [5, 6, 7], max_tokens=1), n=2))
        assert [type(each.error) for each in self.errors(core)] == [NeverBegan, NeverBegan]

    @pytest.mark.parametrize("leader_leaves", [False, True])
    def test_answers_have_begun_with_the_one_that_computes_their_prompt(self, leader_leaves: bool) -> None:
        """It takes a second, and who has not begun may wait for 0.4; who leads then is no matter."""
        core = sim_core(sim=self.SIM, max_wait_s=0.2, max_batched_tokens=4)
        leader, *others = core.take(replace(make_request("three", range(40), max_tokens=2), n=3))
        for _ in range(6):
            core.step()
        if leader_leaves:
            core.cancel(leader.request_id)
        assert not self.errors(core)
        assert [each.num_output_tokens for each in others] == [2, 2]

    def test_without_a_bound_it_waits_as_long_as_it_takes(self) -> None:
        core = self.taken(max_wait_s=None)
        short = core.submit(make_request("short", [5, 6, 7], max_tokens=1))
        assert not self.errors(core)
        assert short.num_output_tokens == 1

    def test_an_answer_that_a_client_has_the_beginning_of_waits_on(self) -> None:
        core = self.taken(max_wait_s=0.1)
        request = replace(make_request("begun", [5, 6, 7, 8], max_tokens=3), num_prompt_tokens=3, attempt=1)
        begun = core.submit(request)
        assert not self.errors(core)
        assert begun.num_output_tokens == 3

    def test_who_has_begun_and_is_put_back_waits_on(self) -> None:
        core = sim_core(10, sim=self.SIM, max_wait_s=0.2)
        expect_short_answers(core)
        taken = [
            core.submit(make_request(f"r{i}", range(10 * i, 10 * i + 10), max_tokens=16)) for i in range(2)
        ]
        assert not self.errors(core)
        assert core.stats().preemptions > 0
        assert [each.num_output_tokens for each in taken] == [16, 16]


def test_prompt_too_long_names_both_numbers() -> None:
    core = sim_core(max_model_len=16)
    with pytest.raises(PromptTooLong) as caught:
        core.submit(make_request("long", range(16)))
    assert (caught.value.prompt_tokens, caught.value.limit) == (16, 15)
    assert not core.has_work


def test_output_is_cut_at_the_model_length() -> None:
    core = sim_core(max_model_len=16)
    [completion] = core.complete([make_request("r", range(12), max_tokens=100)])
    assert (len(completion.token_ids), completion.finish_reason) == (4, "length")


def test_too_large_for_the_cache_is_refused_at_once() -> None:
    """It would otherwise be preempted for ever."""
    core = sim_core(num_blocks=4)
    with pytest.raises(TooLargeForCache, match=r"10 prompt .* 8 output .* 16 tokens \(4 blocks of 4\)"):
        core.submit(make_request("r", range(10), max_tokens=8))


def test_an_id_in_use_is_refused_and_the_first_owner_keeps_it() -> None:
    core = sim_core()
    core.submit(make_request("same", [1]))
    with pytest.raises(RequestRefused, match="request_id") as caught:
        core.submit(make_request("same", [2]))
    assert not isinstance(caught.value, RefusedEverywhere), "another replica may take it"
    assert len(list(core.requests())) == 1


def test_failed_step_leaves_those_outside_it_alone() -> None:
    """Its requests fail, what they had registered is gone, a waiting one runs afterwards and is right."""
    sim = SimConfig(raise_every_steps=2)
    core = sim_core(sim=sim, max_running=2)
    prompt = list(range(9))
    for name in ("a", "b"):
        core.submit(make_request(name, prompt, max_tokens=8))
    core.submit(make_request("c", prompt, max_tokens=1))
    core.step()
    failed = core.step()
    assert {p.request.request_id: type(p.error) for p in failed} == {"a": ForwardFailed, "b": ForwardFailed}
    assert str(failed[0].error) == "the model's forward failed: SimulatedFault"
    [last] = core.step()
    assert last.request.request_id == "c"
    assert last.request.cached_tokens == 8  # from the first step, which succeeded
    assert (last.token_id,) == sim_core().complete([make_request("c", prompt, max_tokens=1)])[0].token_ids
    assert core.stats().cache.free == 64


def test_blocks_registered_by_a_failed_step_are_never_hit() -> None:
    """They were never computed: the next one with this prompt must compute them."""
    core = sim_core(sim=SimConfig(raise_every_steps=1))
    core.submit(make_request("a", range(9)))
    [failed] = core.step()
    assert isinstance(failed.error, ForwardFailed)
    assert core.stats().cache.cached == 0


def test_beside_answers_that_wait_for_a_place_a_newcomer_may_wait() -> None:
    """Unmeasured: 256 full steps of 4 tokens count as the longest wait."""
    core = sim_core(1000, max_running=1, max_wait_s=1.0, max_batched_tokens=4)
    leader, *_ = core.take(replace(make_request("three", [1] * 600, max_tokens=9), n=3))
    while not leader.num_output_tokens:
        core.step()
    core.submit(make_request("short", [5, 6, 7], max_tokens=1))


@pytest.mark.parametrize("num_answers", [2, 63, 64, 100])
def test_nobody_waits_for_places_for_all_answers_of_another_request(num_answers: int) -> None:
    """One long answer runs in 64 places; what comes after a request for many answers, of another tenant, is
    served beside it."""
    core = sim_core(4096, max_running=64, max_batched_tokens=512)
    core.submit(replace(make_request("long", range(20), max_tokens=300, ignore_eos=True), tenant="a"))
    core.step()
    many = make_request("many", range(30, 50), max_tokens=4, ignore_eos=True)
    core.take(replace(many, tenant="b", n=num_answers))
    core.submit(replace(make_request("short", range(60, 80), max_tokens=4, ignore_eos=True), tenant="c"))
    ended: list[str] = []
    for _ in range(30):
        ended += [each.request.request_id for each in core.step() if each.is_last]
    assert "short" in ended
    assert sum(name.startswith("many") for name in ended) == num_answers
