"""Everything that a Router under test keeps of requests until they are over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cache.types import HashHint, RequestId
from router.placement.decision import DecisionRecord, RouteQuery
from router.placement.observer import SilentObserver
from tests.fakes.http import RouterUnderTest


class Ends(SilentObserver):
    """Of each request that whoever watches decisions heard of: how often it was told that it is over."""

    def __init__(self) -> None:
        self.of = Counter[RequestId]()

    def decided(self, record: DecisionRecord, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        self.of[query.request_id] += 0

    def finished(self, request_id: RequestId, hints: Sequence[HashHint], answers: Sequence[int]) -> None:
        self.of[request_id] += 1

    def refused(self, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        self.of[query.request_id] += 1


def num_ended(router: RouterUnderTest) -> float:
    """Requests that were counted, whatever their outcome."""
    (family,) = [each for each in router.parts.metrics.registry.collect() if each.name == "warmpath_requests"]
    return sum(sample.value for sample in family.samples if sample.name == "warmpath_requests_total")


def open_books(router: RouterUnderTest) -> dict[str, float]:
    """What is not back to zero."""
    parts, routing = router.parts, router.parts.routing
    statistics, loads, placer = routing.statistics(), routing._loads, parts.dispatcher.placer
    gate = parts.tenancy.gate
    books = {
        "calls": router.calls.running,
        "in flight": statistics.in_flight,
        "in flight at replicas": sum(replica.in_flight for replica in statistics.replicas),
        "reserved": sum(loads[name].num_unseen for name in routing.replicas),
        "placed": loads.num_in_flight,
        "named by engines": len(loads._seen_by),
        "waiting at replicas": len(routing.queues),
        "late, perhaps": len(routing._late._lateness._sent),
        "expected blocks": len(routing._index._expectations),
        "held": placer.num_held,
        "told as held": statistics.held,
        "held seconds": placer.held_s,
        "unaccounted": parts.insight._accounting.num_open,
        "gauge in flight": router.metric("warmpath_requests_in_flight"),
        "gauge without token": router.metric("warmpath_requests_without_token"),
        "gauge body bytes": router.metric("warmpath_bodies_held_bytes"),
        "prompts on threads": parts.service._encoder.num_pending,
        "visits": sum(each.running for each in gate._allowances.values()) if gate is not None else 0,
    }
    return {name: number for name, number in books.items() if number}
