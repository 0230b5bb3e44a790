"""The journal: requests by any of their names, attempts, times, and how much it keeps."""

from __future__ import annotations

from cache.types import ReplicaId, RequestId
from router.insight.accounting import Accounting
from router.insight.content_sketch import ContentSketch
from router.insight.held_memory import HeldMemory
from router.insight.journal import MAX_ATTEMPTS_KEPT, Journal
from router.insight.shadow import ShadowVerdict
from router.placement.routing import Routing
from tests.fakes.router import FakeClock, config, info, load, query, replica_id

A = replica_id(0)


class Bench:
    def __init__(self, max_requests: int = 10) -> None:
        self.clock = FakeClock()
        self.routing = Routing(config(), clock=self.clock)
        self.journal = Journal(max_requests, max_candidates=1, clock=self.clock)
        accounting = Accounting(
            16,
            held=HeldMemory(1 << 8),
            sketch=ContentSketch(16, num_slots=1 << 8, secret=b"sixteen bytes of a test"),
        )
        accounting.listen(self.journal.accounted)
        self.routing.watch(self.journal)
        self.routing.watch(accounting)
        self.routing.update_replicas({A: info()})
        self.routing.on_load(A, load())


def test_a_life_with_its_times() -> None:
    bench = Bench()
    asked_at = bench.clock.now
    bench.clock.advance(0.5)
    bench.routing.choose(query("r", asked_at=asked_at))
    entry = bench.journal.find("r")
    assert entry is not None
    assert (entry.asked_at, entry.decision.decided_at) == (asked_at, asked_at + 0.5)
    assert entry.first_token_at is entry.account is entry.finished_at is None
    bench.clock.advance(0.25)
    bench.routing.first_token(RequestId("r"), A, 0)
    bench.clock.advance(1.0)
    bench.routing.finish(RequestId("r"), answers=(7,))
    assert entry.first_token_at == asked_at + 0.75
    assert entry.finished_at == asked_at + 1.75
    assert entry.num_output_tokens == 7
    assert entry.account is not None
    assert entry.decision is entry.answering is entry.decisions[0]


def test_names_are_forgiving() -> None:
    bench = Bench()
    first, second, third = f"mine-{'1' * 8}", f"mine-{'2' * 8}", f"min-{'3' * 8}"
    for name in (first, second, third):
        bench.routing.choose(query(name))
    for asked, found in (
        (first, first),
        (f"cmpl-{first}", first),
        (f"chatcmpl-{second}", second),
        ("mine", second),  # the newest of that name
        ("min", third),
    ):
        entry = bench.journal.find(asked)
        assert entry is not None
        assert entry.request_id == found
    assert bench.journal.find("mi") is None
    assert bench.journal.find("") is None


def test_a_clients_id_may_begin_like_those_in_answers() -> None:
    bench = Bench()
    chat, completion = "chatcmpl-7-0123abcd", "cmpl-8-89abcdef"
    for name in (chat, completion):
        bench.routing.choose(query(name))
    for asked, found in (
        ("chatcmpl-7", chat),
        (f"cmpl-{chat}", chat),
        ("cmpl-8", completion),
        (f"chatcmpl-{completion}", completion),
    ):
        entry = bench.journal.find(asked)
        assert entry is not None, asked
        assert entry.request_id == found


def test_nobody_else_answers_for_a_name() -> None:
    """`job` was found where only `job-2` was kept, another client's request."""
    bench = Bench()
    for name in (
        "job-2",
        "job-2-0123abcd",
        "job-20261129-0123abcd",
        "job-20261129-12345678",
        "job-x-0123abcd",
    ):
        bench.routing.choose(query(name))
    assert bench.journal.find("job") is None
    assert bench.journal.find("job-20261129-1234567") is None


def test_prompts_of_one_body_are_found_by_its_names() -> None:
    """Also where the first has been forgotten; a copy made beside them is none of them."""
    bench = Bench()
    for name in ("job-0123abcd-11", "job-0123abcd-copy-1", "job-0123abcd-11-copy-2", "job-0123abcd-0"):
        bench.routing.choose(query(name))
    for asked in ("job", "job-0123abcd", "cmpl-job-0123abcd", "job-0123abcd-11"):
        entry = bench.journal.find(asked)
        assert entry is not None, asked
        assert entry.request_id == "job-0123abcd-11"
    copy = bench.journal.find("job-0123abcd-copy-1")
    assert copy is not None
    assert copy.request_id == "job-0123abcd-copy-1"


def test_many_attempts_are_counted_and_the_latest_kept() -> None:
    bench = Bench()
    for _ in range(MAX_ATTEMPTS_KEPT + 3):
        bench.routing.choose(query("r"))
    entry = bench.journal.find("r")
    assert entry is not None
    assert (entry.num_attempts, len(entry.decisions)) == (MAX_ATTEMPTS_KEPT + 3, MAX_ATTEMPTS_KEPT)


def test_the_oldest_requests_go_first() -> None:
    bench = Bench(max_requests=3)
    for number in range(5):
        bench.routing.choose(query(str(number)))
        bench.routing.finish(RequestId(str(number)))
    assert [entry.request_id for entry in bench.journal.latest(10)] == ["4", "3", "2"]
    assert [entry.request_id for entry in bench.journal.latest(1)] == ["4"]
    assert bench.journal.latest(0) == bench.journal.latest(-1) == []
    assert len(bench.journal) == 3
    bench.journal.first_token(RequestId("0"), A, 0)  # forgotten ones are ignored
    bench.journal.finished(RequestId("0"), (), (1,))


def test_what_is_told_is_of_the_attempt_that_answered() -> None:
    bench = Bench()
    for number in range(MAX_ATTEMPTS_KEPT + 3):
        bench.clock.advance(1.0)
        bench.routing.choose(query("r"))
        if number == 1:
            answering_at = bench.clock.now
            bench.routing.first_token(RequestId("r"), A, 0)
    entry = bench.journal.find("r")
    assert entry is not None
    assert (entry.attempt, entry.decision.decided_at) == (2, answering_at)
    assert entry.rest_to == A


def test_a_verdict_is_of_the_attempt_that_answered() -> None:
    bench = Bench()

    def verdict(replica: str) -> ShadowVerdict:
        return ShadowVerdict(RequestId("r"), "shadow", ReplicaId(replica), 0, False, None)

    bench.routing.choose(query("r"))
    bench.journal.shadowed(verdict("first"))
    bench.routing.choose(query("r"))
    entry = bench.journal.find("r")
    assert entry is not None
    assert entry.verdict is None
    bench.journal.shadowed(verdict("second"))
    bench.routing.first_token(RequestId("r"), A, 0)
    bench.journal.shadowed(verdict("after the first token"))
    assert entry.verdict == verdict("second")
    bench.journal.shadowed(ShadowVerdict(RequestId("unknown"), "shadow", A, 0, True, 0.0))


def test_what_has_changed_since_is_told_with_what_it_is_now() -> None:
    bench = Bench()
    for name in ("a", "b", "c"):
        bench.routing.choose(query(name))
    seen = bench.journal.revision
    assert [entry.request_id for entry in bench.journal.changed_since(0, 10)] == ["c", "b", "a"]
    assert bench.journal.changed_since(seen, 10) == []
    bench.routing.first_token(RequestId("a"), A, 0)
    [entry] = bench.journal.changed_since(seen, 10)
    assert (entry.request_id, entry.number) == ("a", 1)
    assert entry.account is not None
    seen = bench.journal.revision
    bench.routing.choose(query("d"))
    bench.routing.finish(RequestId("b"))
    assert [entry.request_id for entry in bench.journal.changed_since(seen, 10)] == ["d", "b"]
    assert [entry.request_id for entry in bench.journal.changed_since(seen, 2)] == ["d"]  # of the latest two
