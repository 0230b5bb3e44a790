"""Laws of threads that tenants share: turns, order, bounds, and nothing lost, whoever comes, leaves or fails.

Real threads run jobs that end when they are told to, so what has begun is known after each step.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache.errors import QueueFull
from cache.fair_threads import FairThreads

NUM_THREADS = 2
MAX_PENDING = 7
TENANTS = st.sampled_from(["alice", "bob", "carol", "dave"])
LIMIT_S = 20.0


class JobError(Exception):
    """What a job raises that is told to fail."""


@dataclass(eq=False)
class Job:
    tenant: str
    number: int
    begun: Callable[[Job], None]
    may_end: threading.Event = field(default_factory=threading.Event)
    is_to_fail: bool = False
    overtaken_by: set[str] = field(default_factory=set)  # tenants, since it was its own's first
    future: Future[int] = field(init=False)
    has_left: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> int:
        self.begun(self)
        assert self.may_end.wait(LIMIT_S)
        if self.is_to_fail:
            raise JobError(self.number)
        return self.number


class FairThreadsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.threads = FairThreads(NUM_THREADS, "fair", max_pending=MAX_PENDING)
        self.changed = threading.Condition()
        self.started: list[Job] = []  # by the threads, in order
        self.num_seen = 0  # of them
        self.waiting: list[Job] = []  # by age
        self.running: list[Job] = []
        self.number = 0

    # --- what happens -------------------------------------------------------------------------

    @rule(tenant=TENANTS)
    def comes(self, tenant: str) -> None:
        self.number += 1
        job = Job(tenant, self.number, self._has_begun)
        before = Counter(job.tenant for job in self.waiting)
        is_full = len(self.waiting) + len(self.running) >= MAX_PENDING
        most = max(before.values(), default=0)
        try:
            job.future = self.threads.submit(tenant, job)
        except QueueFull:
            assert is_full
            assert before[tenant] + 1 >= most
            return
        displaced = [other for other in self.waiting if other.future.cancelled()]
        assert len(displaced) == is_full
        for other in displaced:
            assert before[other.tenant] == most > before[tenant] + 1
            assert other is [each for each in self.waiting if each.tenant == other.tenant][-1]
            self.waiting.remove(other)
        job.future.add_done_callback(lambda _: job.has_left.set())  # after the threads' own
        self.waiting.append(job)
        self._settle()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), is_to_fail=st.booleans())
    def ends(self, data: st.DataObject, is_to_fail: bool) -> None:
        job = data.draw(st.sampled_from(self.running))
        job.is_to_fail = is_to_fail
        job.may_end.set()
        if is_to_fail:
            with pytest.raises(JobError, match=str(job.number)):
                job.future.result(LIMIT_S)
        else:
            assert job.future.result(LIMIT_S) == job.number
        assert job.has_left.wait(LIMIT_S)
        self.running.remove(job)
        self._settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_waiting_one_is_given_up(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.waiting))
        assert job.future.cancel()
        self.waiting.remove(job)
        with pytest.raises(CancelledError):
            job.future.result(0)
        self._settle()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_running_one_is_given_up(self, data: st.DataObject) -> None:
        """And keeps its thread."""
        assert not data.draw(st.sampled_from(self.running)).future.cancel()
        self._settle()

    def teardown(self) -> None:
        self.threads.close()
        self.threads.close()
        assert all(job.future.cancelled() for job in self.waiting)
        with pytest.raises(RuntimeError):
            self.threads.submit("alice", int)
        num_started = len(self.started)
        for job in self.running:
            job.may_end.set()
            assert job.future.result(LIMIT_S) == job.number
        for thread in list(self.threads._pool._threads):
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        assert len(self.started) == num_started
        assert self.threads.num_pending == 0

    # --- what holds ---------------------------------------------------------------------------

    @invariant()
    def all_are_counted(self) -> None:
        assert self.threads.num_pending == len(self.waiting) + len(self.running) <= MAX_PENDING

    @invariant()
    def whoever_is_gone_is_forgotten(self) -> None:
        assert set(self.threads._lines) == {job.tenant for job in self.waiting}

    def _settle(self) -> None:
        """Until no thread is idle while somebody waits; who has begun for that was next."""
        while self.waiting and len(self.running) < NUM_THREADS:
            with self.changed:
                assert self.changed.wait_for(lambda: len(self.started) > self.num_seen, LIMIT_S)
            job = self.started[self.num_seen]
            self.num_seen += 1
            self._check_turn(job)
            self.waiting.remove(job)
            self.running.append(job)
        assert len(self.started) == self.num_seen

    def _check_turn(self, job: Job) -> None:
        """Its tenant's first; since the others' firsts became that, no other of its tenant's has begun."""
        firsts: dict[str, Job] = {}
        for other in self.waiting:
            firsts.setdefault(other.tenant, other)
        assert firsts.pop(job.tenant) is job
        for first in firsts.values():
            assert job.tenant not in first.overtaken_by
            first.overtaken_by.add(job.tenant)

    def _has_begun(self, job: Job) -> None:
        with self.changed:
            self.started.append(job)
            self.changed.notify_all()


TestFairThreads = FairThreadsMachine.TestCase
TestFairThreads.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_many_at_once_from_many_threads_are_each_run_once_or_cancelled() -> None:
    """Without steps: what comes, is cancelled and ends in the same moment is still in one place."""
    threads = FairThreads(NUM_THREADS, "fair")
    ran: list[tuple[str, int]] = []
    futures: dict[tuple[str, int], Future[None]] = {}

    def send(tenant: str) -> None:
        for number in range(300):
            futures[tenant, number] = threads.submit(tenant, partial(ran.append, (tenant, number)))
            if number % 3 == 0:
                futures[tenant, number].cancel()

    senders = [threading.Thread(target=send, args=(tenant,)) for tenant in ("alice", "bob", "carol")]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(LIMIT_S)
    for future in futures.values():
        if not future.cancelled():
            assert future.result(LIMIT_S) is None
    assert sorted(ran) == sorted(place for place, future in futures.items() if not future.cancelled())
    assert len(ran) >= 600
    threads.close()
    for thread in list(threads._pool._threads):
        thread.join(LIMIT_S)
    assert (threads.num_pending, threads._num_working) == (0, 0)


@pytest.mark.parametrize("job", [int, lambda: 1 // 0])
def test_whoever_sees_a_job_done_sees_its_place_free(
    monkeypatch: pytest.MonkeyPatch, job: Callable[[], int]
) -> None:
    """Or who asks at once for another one is told that there is no room."""
    threads, seen = FairThreads(1, "fair", max_pending=1), list[tuple[bool, int]]()
    tell = Future._invoke_callbacks  # type: ignore[attr-defined]  # a future is done before it tells

    def look(future: Future[int]) -> None:
        seen.append((future.done(), threads.num_pending))
        tell(future)

    monkeypatch.setattr(Future, "_invoke_callbacks", look)
    threads.submit("alice", job).exception(LIMIT_S)
    threads.close()
    for thread in list(threads._pool._threads):
        thread.join(LIMIT_S)
    assert (True, 0) in seen
    assert (True, 1) not in seen


def test_an_error_keeps_nothing_of_its_job() -> None:
    threads = FairThreads(1, "fair")
    future = threads.submit("alice", lambda: 1 // 0)
    error = future.exception(LIMIT_S)
    assert isinstance(error, ZeroDivisionError)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert all(value is not future for frame in frames for value in frame.f_locals.values())
    threads.close()


def test_a_thread_that_cannot_be_started_is_told_and_nothing_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = FairThreads(1, "fair", max_pending=1)

    def refuse(_work: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threads._pool, "submit", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="start new thread"):
                threads.submit("alice", int)
    assert threads.submit("alice", int).result(LIMIT_S) == 0
    threads.close()
