"""What an engine tells of itself is told when it is due, and not before.

`integration/test_engine_pace.py` has the pace of an engine at work.
"""

from __future__ import annotations

import pytest

from cache.engine_report import EngineReport
from cache.event_log import EventLog
from cache.events import EventBatch, RequestEnded
from cache.types import RequestId
from replica.engine import bulletins
from replica.engine.bulletins import DECODE_LOAD_INTERVAL_S, LOAD_INTERVAL_S, REPORT_INTERVAL_S, Bulletins
from tests.fakes.engine import VirtualClock, make_request, sim_core

HEARTBEAT_S = 1.0


class Heard:
    """An engine's bulletins, and who hears of them."""

    def __init__(self) -> None:
        self.clock, events = VirtualClock(), EventLog(epoch=7)
        self.core = sim_core(sink=events, clock=self.clock)
        self.batches: list[EventBatch] = []
        self.reports: list[EngineReport] = []
        self.bulletins = Bulletins(
            self.core,
            events=events,
            publish=self.batches.append,
            report=self.reports.append,
            heartbeat_interval_s=HEARTBEAT_S,
            clock=self.clock,
        )
        self.bulletins.publish_if_due()
        self.batches.clear()

    def num_told_after(self, seconds: float) -> int:
        self.clock.now_s += seconds
        before = len(self.batches)
        self.bulletins.publish_if_due()
        return len(self.batches) - before


def decoding(*, max_tokens: int) -> Heard:
    """An engine that has just computed the prompt of its one request."""
    heard = Heard()
    heard.core.submit(make_request("r", range(9), max_tokens=max_tokens))
    heard.bulletins.admitted(RequestId("r"))
    heard.num_told_after(0.0)
    heard.core.step()
    return heard


def test_of_nothing_a_heartbeat_tells() -> None:
    heard = Heard()
    assert heard.num_told_after(0.75) == 0
    assert heard.bulletins.until_heartbeat_s() == 0.25
    assert heard.num_told_after(0.25) == 1
    assert heard.bulletins.until_heartbeat_s() == HEARTBEAT_S


def test_who_was_taken_in_is_named_at_once_and_once() -> None:
    heard = Heard()
    heard.core.submit(make_request("r", range(9)))
    heard.bulletins.admitted(RequestId("r"))
    assert heard.num_told_after(0.0) == 1
    assert heard.num_told_after(0.0) == 0
    assert heard.num_told_after(LOAD_INTERVAL_S) == 1
    assert [batch.load.admitted for batch in heard.batches] == [("r",), ()]
    assert heard.bulletins.load.num_waiting == 1


def test_what_has_ended_is_named_at_once_and_once_however_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulletins, "MAX_ENDED_PER_BATCH", 2)
    heard = Heard()
    ended = [RequestEnded(RequestId(f"{number}"), 0, number) for number in range(5)]
    for each in ended:
        heard.bulletins.ended(each)
    assert heard.num_told_after(0.0) == 3
    assert heard.num_told_after(HEARTBEAT_S) == 1
    assert [each for batch in heard.batches for each in batch.load.ended] == ended
    assert [len(batch.load.ended) for batch in heard.batches] == [2, 2, 1, 0]


def test_an_end_and_a_drain_are_told_at_once() -> None:
    heard = Heard()
    heard.bulletins.changed()
    assert heard.num_told_after(0.0) == 1
    heard.bulletins.drains()
    assert heard.num_told_after(0.0) == 1
    assert [batch.load.is_draining for batch in heard.batches] == [False, True]
    heard.bulletins.stepped()
    assert heard.bulletins.load.is_draining


def test_while_all_only_decode_nobody_looks_before_the_next_batch() -> None:
    """Twenty tokens in fifty milliseconds change nothing that anybody would do otherwise."""
    heard = decoding(max_tokens=64)
    heard.bulletins.stepped()  # the prompt is computed: that is seen at once
    assert heard.bulletins.load.queued_uncached_tokens == 0
    assert heard.num_told_after(LOAD_INTERVAL_S) == 1
    seen = heard.bulletins.stats.num_steps
    for _ in range(3):
        heard.core.step()
        heard.bulletins.stepped()
    assert heard.bulletins.stats.num_steps == seen
    assert heard.num_told_after(DECODE_LOAD_INTERVAL_S) == 1
    assert heard.bulletins.stats.num_steps == seen + 3
    heard.core.submit(make_request("other", range(20, 29)))
    heard.bulletins.stepped()  # somebody waits
    assert heard.bulletins.load.num_waiting == 1


def test_an_end_is_seen_before_it_is_told() -> None:
    """Whoever has the last token of an answer finds it counted."""
    heard = decoding(max_tokens=2)
    heard.bulletins.stepped()
    heard.num_told_after(LOAD_INTERVAL_S)
    heard.core.step()
    heard.bulletins.changed()
    heard.bulletins.stepped()
    assert (heard.bulletins.load.num_running, heard.bulletins.stats.output_tokens) == (0, 2)


def test_reports_are_numbered_and_come_twice_a_second() -> None:
    heard = Heard()
    for _ in range(3):
        heard.bulletins.report_if_due()
        heard.bulletins.report_if_due()
        heard.clock.now_s += REPORT_INTERVAL_S
    assert [(report.epoch, report.number) for report in heard.reports] == [(7, 1), (7, 2), (7, 3)]
