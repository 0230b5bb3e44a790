"""Requests of the last minute."""

from __future__ import annotations

from cache.types import ReplicaId
from router.policies.indexes.request_rate import RequestRate

A, B = ReplicaId("a"), ReplicaId("b")


def test_requests_leave_the_window() -> None:
    rate = RequestRate(60.0)
    rate.add(A)
    for second in range(90):
        rate.record(A, float(second))
    assert rate.num_requests(A, 89.0) == 60
    assert rate.num_requests(A, 148.0) == 1
    assert rate.num_requests(A, 149.0) == 0


def test_a_burst_is_counted_whole() -> None:
    rate = RequestRate(60.0)
    rate.add(A)
    for _ in range(1000):
        rate.record(A, 5.0)
    assert rate.num_requests(A, 5.0) == 1000


def test_unknown_replicas_have_no_rate() -> None:
    rate = RequestRate(60.0)
    rate.record(B, 1.0)
    assert rate.num_requests(B, 1.0) == 0
    rate.add(B)
    rate.record(B, 1.0)
    rate.remove(B)
    assert rate.num_requests(B, 1.0) == 0
