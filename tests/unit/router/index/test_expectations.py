"""A prediction ends with the last request that stands behind it, unless a token came of one."""

from __future__ import annotations

from collections.abc import Sequence

from cache.types import HashHint, ReplicaId, RequestId
from router.index.expectations import Expectations
from router.placement.routing import Routing
from tests.fakes.router import FakeClock, config, decisions_of, hint_chain, info, load, query, replica_id

A, B = replica_id(0), replica_id(1)


class FakeIndex:
    """Remembers which chains are predicted where."""

    def __init__(self) -> None:
        self.predicted: dict[tuple[ReplicaId, HashHint], float] = {}

    def predict(self, replica_id: ReplicaId, hints: Sequence[HashHint], expires_at: float) -> None:
        self.predicted[replica_id, hints[-1]] = expires_at

    def retract(self, replica_id: ReplicaId, hints: Sequence[HashHint]) -> None:
        del self.predicted[replica_id, hints[-1]]


HINTS = hint_chain("prompt", 3)


def test_it_expires_when_told() -> None:
    index = FakeIndex()
    Expectations(index, ttl_s=5.0).expect(RequestId("one"), A, HINTS, now=10.0)
    assert index.predicted == {(A, HINTS[-1]): 15.0}


def test_a_failed_attempt_takes_its_prediction_along() -> None:
    index = FakeIndex()
    expectations = Expectations(index, ttl_s=5.0)
    expectations.expect(RequestId("one"), A, HINTS, now=0.0)
    expectations.drop(RequestId("one"))
    expectations.drop(RequestId("one"))
    assert not index.predicted
    assert len(expectations) == 0


def test_a_first_token_makes_it_stay() -> None:
    index = FakeIndex()
    expectations = Expectations(index, ttl_s=5.0)
    expectations.expect(RequestId("one"), A, HINTS, now=0.0)
    expectations.keep(RequestId("one"))
    expectations.drop(RequestId("one"))
    assert index.predicted
    assert len(expectations) == 0


def test_a_twin_keeps_it_alive() -> None:
    index = FakeIndex()
    expectations = Expectations(index, ttl_s=5.0)
    expectations.expect(RequestId("one"), A, HINTS, now=0.0)
    expectations.expect(RequestId("two"), A, HINTS, now=0.0)
    expectations.drop(RequestId("one"))
    assert index.predicted
    expectations.drop(RequestId("two"))
    assert not index.predicted


def test_a_request_taken_elsewhere_is_expected_there_alone() -> None:
    index = FakeIndex()
    expectations = Expectations(index, ttl_s=5.0)
    expectations.expect(RequestId("one"), A, HINTS, now=0.0)
    expectations.expect(RequestId("one"), B, HINTS, now=0.0)
    assert list(index.predicted) == [(B, HINTS[-1])]


def test_a_prompt_without_a_full_block_predicts_nothing() -> None:
    index = FakeIndex()
    expectations = Expectations(index, ttl_s=5.0)
    expectations.expect(RequestId("one"), A, [], now=0.0)
    expectations.drop(RequestId("one"))
    assert not index.predicted


def _routing() -> Routing:
    routing = Routing(config(), clock=FakeClock())
    routing.update_replicas({A: info(), B: info()})
    for each in (A, B):
        routing.on_load(each, load())
    return routing


def test_a_refused_request_draws_no_twin_to_where_it_was_not_computed() -> None:
    routing = _routing()
    routing.choose(query("one"))
    routing.release(RequestId("one"))
    assert routing.choose(query("two", block_hashes=query("one").block_hashes)).overlap_blocks == 0


def test_an_answered_request_draws_its_twin_before_any_event() -> None:
    routing = _routing()
    placed = routing.choose(query("one"))
    routing.first_token(RequestId("one"), placed.replica_id, 0)
    routing.release(RequestId("one"))
    twin = routing.choose(query("two", block_hashes=query("one").block_hashes))
    assert (twin.replica_id, twin.overlap_blocks) == (placed.replica_id, 8)


def test_so_does_one_that_another_replica_has_gone_on_with() -> None:
    """It was not drawn to either: nobody had computed what the second one was expected to hold."""
    routing = _routing()
    first = routing.choose(query("one")).replica_id
    routing.first_token(RequestId("one"), first, 0)
    routing.release(RequestId("one"))
    routing.replica_lost(first)
    second = routing.choose(query("one", is_again=True, attempt=1)).replica_id
    routing.continued(RequestId("one"))
    routing.release(RequestId("one"))
    twin = routing.choose(query("two", block_hashes=query("one").block_hashes))
    assert (twin.replica_id, twin.overlap_blocks) == (second, 8)


def test_a_record_tells_what_the_replica_said_from_what_was_guessed() -> None:
    routing = _routing()
    records = decisions_of(routing)
    routing.choose(query("one"))
    routing.choose(query("two", block_hashes=query("one").block_hashes))
    _, record = records
    assert record.ranked[0].candidate.cached_tokens == record.available_tokens == 8 * 16
    assert record.exact_tokens == 0
