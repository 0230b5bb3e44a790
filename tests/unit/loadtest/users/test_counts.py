"""What workers count adds up to what one process would have counted, and fits the wire between them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from loadtest.client.answer import Answer, Failure
from loadtest.users.counts import Counts, failure_name


def answer(*, cached: int | None = 30, replica: str | None = "a", failure: Failure | None = None) -> Answer:
    return Answer(0.0, 1.0, 0.5, (), 40, cached, 3, replica, ("length",), ("x",), 200, failure)


def test_workers_counts_add_up() -> None:
    together, master = Counts(), Counts()
    answers = [answer(), answer(replica="b"), answer(cached=None), answer(failure=Failure.NO_DONE)]
    for share in (answers[:2], answers[2:], []):
        worker = Counts()
        for each in share:
            worker.of("chat").add(each)
            together.of("chat").add(each)
        master.merge(json.loads(json.dumps(worker.take())))
        assert worker.by_scenario == {}  # nothing is sent twice
    assert master.by_scenario == together.by_scenario


def test_hits_are_over_answers_that_told_both() -> None:
    counts = Counts().of("chat")
    assert counts.hit_ratio is None
    for each in (answer(), answer(cached=None), answer(cached=10, failure=Failure.CUT)):
        counts.add(each)
    assert counts.hit_ratio == pytest.approx(30 / 40)
    assert (counts.answers, counts.failures) == (2, {"connection cut": 1})


def test_the_table_names_replicas_ends_votes_and_failures() -> None:
    counts = Counts()
    for each in (answer(), answer(), answer(replica=None), answer(failure=Failure.BUSY)):
        counts.of("self_consistency").add(each)
    counts.of("self_consistency").votes, counts.of("self_consistency").agreement = 2, 1.2
    line = counts.lines()[1]
    for part in ("self_consistency", "75.0 %", "a 2, not told 1", "length 3", "60 % of", "refused as busy 1"):
        assert part in line


@pytest.mark.parametrize(
    ("problems", "named"),
    [
        (
            [
                '{"error": {"message": "request req-9f31 waited 12.5 s", "type": "overloaded"}}',
                '{"error": {"message": "request req-07aa-11 waited 3 s", "type": "overl',
            ],
            "refused as busy (429): request … waited … s",
        ),
        (
            ["Connect call failed ('127.0.0.1', 40112)", "Connect call failed ('127.0.0.1', 40114)"],
            "refused as busy (429): Connect call failed ('…', …)",
        ),
        (
            [f"{'too long ' * 30}{end}" for end in ("so", "or so")],
            f"refused as busy (429): {'too long ' * 11}t…",
        ),
        ([""], "refused as busy (429)"),
    ],
    ids=["json", "ports", "long", "silent"],
)
def test_failures_of_a_kind_have_one_name(problems: list[str], named: str) -> None:
    """Locust's table of failures had a row for each request, with its id or port."""
    found = {
        failure_name(replace(answer(failure=Failure.BUSY), status=429, problem=each)) for each in problems
    }
    assert found == {named}
