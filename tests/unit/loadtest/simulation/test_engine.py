"""One simulated replica, worked out by hand: what each step takes, and who is told what and when."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cache.event_log import EventLog
from cache.events import EventBatch, Load
from cache.kv_cache_manager import KVCacheManager
from cache.types import ReplicaId, RequestId
from loadtest.simulation.clock import EventQueue
from loadtest.simulation.engine import HEARTBEAT_S, SimEngine
from loadtest.simulation.turns import Turn, TurnHasher, copy_turn, fingerprint, make_turns
from replica.scheduling.step_time import attention_pairs
from tests.fakes.simulation import BLOCK_TOKENS, MACHINE, unrelated

MODEL = MACHINE.step_time()


class Listener:
    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue
        self.first_tokens: list[tuple[int, float]] = []
        self.ends: list[tuple[int, float]] = []
        self.batches: list[tuple[float, EventBatch]] = []
        self.loads: list[tuple[float, Load]] = []

    def first_token(self, engine: SimEngine, turn: Turn, cached_tokens: int) -> None:
        self.first_tokens.append((turn.index, self._queue.now))

    def finished(self, engine: SimEngine, turn: Turn) -> None:
        self.ends.append((turn.index, self._queue.now))

    def published(self, engine: SimEngine, batch: EventBatch) -> None:
        self.batches.append((self._queue.now, batch))

    def told_load(self, engine: SimEngine, load: Load) -> None:
        self.loads.append((self._queue.now, load))

    def between_steps(self, engine: SimEngine) -> None:
        pass


class Stage:
    """One engine, its requests, and a clock that runs until it is told to stop."""

    def __init__(self, *shapes: tuple[float, int, int], num_blocks: int = 64, jumps: bool = True) -> None:
        self.queue = EventQueue()
        self.listener = Listener(self.queue)
        events = EventLog(epoch=1)
        cache = KVCacheManager(
            num_blocks, TurnHasher(fingerprint(BLOCK_TOKENS)), block_size=BLOCK_TOKENS, sink=events
        )
        self.engine = SimEngine(
            0,
            ReplicaId("r0"),
            MACHINE,
            cache,
            num_blocks=num_blocks,
            queue=self.queue,
            listener=self.listener,
            events=events,
            jumps=jumps,
        )
        for turn in make_turns(unrelated(*shapes)):
            self.queue.at(turn.work.arrival_s, self.engine.submit, turn)

    def run_until(self, time_s: float) -> None:
        self.queue.at(time_s, lambda: None)
        while self.queue.now < time_s:
            self.queue.step()


def step_s(*parts: tuple[int, int]) -> float:
    """A step in which each sequence computes `new` tokens after `start`."""
    attention = sum(attention_pairs(start, new) for start, new in parts)
    return MODEL.step_s(sum(new for _, new in parts), attention, len(parts))


def test_a_lone_prompt_in_two_chunks_and_three_tokens() -> None:
    stage = Stage((0.0, 100, 3))
    stage.run_until(1.0)
    first_s = step_s((0, 64)) + step_s((64, 36))
    assert stage.listener.first_tokens == [(0, pytest.approx(first_s))]
    assert stage.listener.ends == [(0, pytest.approx(first_s + step_s((100, 1)) + step_s((101, 1))))]
    assert stage.engine.prefill_tokens == 100
    assert stage.engine.num_steps == 4
    assert stage.engine.busy_s == pytest.approx(stage.listener.ends[0][1])


def test_whoever_comes_inside_a_step_is_in_the_next() -> None:
    """The first decodes when the second comes, in its fifth step; both are in the sixth."""
    began = step_s((0, 20)) + sum(step_s((20 + i, 1)) for i in range(4))
    during = step_s((24, 1))
    stage = Stage((0.0, 20, 12), (began + during / 2, 30, 2))
    stage.run_until(1.0)
    together_s = step_s((25, 1), (0, 30))
    expected_s = began + during + together_s
    assert stage.listener.first_tokens[1] == (1, pytest.approx(expected_s))
    assert stage.listener.ends[0] == (1, pytest.approx(expected_s + step_s((26, 1), (30, 1))))


def test_routers_hear_of_arrivals_blocks_and_ends() -> None:
    stage = Stage((0.1, 40, 2))
    stage.run_until(0.4)
    (came_s, came), *_, (ended_s, ended) = stage.listener.batches
    assert came_s == 0.1
    assert came.load.admitted == ("0",)
    assert came.load.num_waiting == 1
    assert came.load.queued_uncached_tokens == 40
    assert came.load.step_time == MODEL
    assert ended_s == pytest.approx(stage.listener.ends[0][1])
    assert ended.load.num_running == 0
    stored = [name for _, batch in stage.listener.batches for name in batch.stored]
    assert len(stored) == 40 // BLOCK_TOKENS
    assert [batch.seq for _, batch in stage.listener.batches] == list(
        range(1, len(stage.listener.batches) + 1)
    )


def test_routers_hear_at_once_of_whoever_comes_inside_a_step() -> None:
    """The first step takes 88 ms; the second request comes after 20, and is no news when it is over."""
    stage = Stage((0.0, 64, 2), (0.02, 40, 2))
    stage.run_until(0.5)
    ((told_s, load),) = stage.listener.loads
    assert told_s == 0.02
    assert load.admitted == ("1",)
    assert load.num_waiting == 2  # the first is still in the account that the engine gave when it came
    assert 40 < load.queued_uncached_tokens < 104
    later = [name for _, batch in stage.listener.batches[1:] for name in batch.load.admitted]
    assert later == ["1"]


def test_an_idle_replica_says_that_it_is_there() -> None:
    stage = Stage()
    stage.run_until(2.2)
    assert [time_s for time_s, _ in stage.listener.batches] == pytest.approx([0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize("jumps", [True, False])
def test_a_long_answer_does_not_silence_its_replica(jumps: bool) -> None:
    """Jumping or not, a heartbeat goes out with the first step after it is due."""
    stage = Stage((0.0, 10, 200), jumps=jumps)
    stage.run_until(2.4)
    times = [time_s for time_s, _ in stage.listener.batches]
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) <= HEARTBEAT_S + step_s((200, 1))


def test_a_dead_replica_gives_back_its_requests_with_their_tokens() -> None:
    """Killed inside the step that makes its fourth token; the second request waits in the inbox."""
    fourth_s = step_s((0, 20)) + step_s((20, 1)) + step_s((21, 1)) + step_s((22, 1))
    stage = Stage((0.0, 20, 12), (fourth_s - 0.004, 30, 2))
    stage.run_until(fourth_s - 0.002)
    lost = [(turn.index, num_output) for turn, num_output in stage.engine.kill()]
    assert lost == [(0, 3), (1, 0)]
    stage.run_until(2.0)
    assert len(stage.listener.first_tokens) == 1
    assert stage.listener.ends == []
    assert all(time_s < fourth_s for time_s, _ in stage.listener.batches)


def test_a_continued_request_prefills_what_it_brings_and_tells_no_second_first_token() -> None:
    stage = Stage((5.0, 20, 12))
    (turn,) = make_turns(unrelated((0.0, 20, 12)))
    stage.engine.submit(turn, num_output=4)
    stage.run_until(1.0)
    assert stage.listener.first_tokens == []
    expected_s = step_s((0, 24)) + sum(step_s((24 + i, 1)) for i in range(7))
    assert stage.listener.ends == [(0, pytest.approx(expected_s))]


def test_copies_of_prefixes_say_nothing_of_how_long_answers_are() -> None:
    """They end with their prompts, as those for the cache alone do at a real engine."""
    answered, answering = (0.0, BLOCK_TOKENS, 4 * BLOCK_TOKENS), (40.0, 9 * BLOCK_TOKENS, 4 * BLOCK_TOKENS)
    grown = []
    for num_copies in (0, 8):
        stage = Stage(answered, answering, num_blocks=16)
        for number in range(num_copies):
            copy = copy_turn(RequestId(f"copy-{number}"), BLOCK_TOKENS, [], 20.0 + number)
            stage.queue.at(copy.work.arrival_s, stage.engine.submit, copy)
        stage.run_until(40.0 + step_s((0, 9 * BLOCK_TOKENS)))
        grown.append(stage.engine.scheduler.load(()).growth_blocks)
    assert grown[0] == grown[1] > 0
