"""What is said of a request when it is over: one line, three spans, the engine's own times."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cache.log_fields import fields_of
from cache.tracing import Attributes, Span
from replica.config import SimConfig
from replica.engine.engine_core import EngineCore
from replica.engine.request_watch import RequestLog, RequestTraces
from tests.fakes.engine import VirtualClock, make_request, sim_core

SIM = SimConfig(base_s=0.1, per_token_s=0.01, per_attention_s=0.0, per_sequence_s=0.0)
SECOND = 1_000_000_000
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class Spans:
    """A `Tracing` that remembers."""

    told: list[tuple[str, str, dict[str, Any], int, int, str | None]] = field(default_factory=list)

    def begin(
        self, name: str, parent: str = "", *, attributes: Attributes | None = None, at_ns: int | None = None
    ) -> Span:
        spans, given = self, dict(attributes or {})

        class OneSpan:
            traceparent = ""

            def tell(self, attributes: Attributes) -> None:
                given.update(attributes)

            def end(self, error: str | None = None, *, at_ns: int | None = None) -> None:
                spans.told.append((name, parent, given, began_ns, at_ns or 0, error))

        began_ns = at_ns or 0
        return OneSpan()

    def close(self) -> None:
        pass


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def core(clock: VirtualClock) -> EngineCore:
    return sim_core(sim=SIM, clock=clock)


def run(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def lines(records: Iterable[logging.LogRecord]) -> list[dict[str, object]]:
    return [fields_of(record) for record in records if record.message == "generation ended"]


def test_one_line_says_how_it_went(core: EngineCore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "replica")
    core.watch(RequestLog())
    core.submit(make_request("r-1", range(10), max_tokens=3), arrival_s=-2.0)
    run(core)
    assert lines(caplog.records) == [
        {
            "request_id": "r-1",
            "outcome": "length",
            "prompt_tokens": 10,
            "cached_tokens": 0,
            "output_tokens": 3,
            "num_preemptions": 0,
            "queue_s": 2.0,
            "prefill_s": 0.2,
            "decode_s": 0.22,
        }
    ]


def test_one_that_never_ran_says_how_long_it_waited(
    core: EngineCore, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "replica")
    core.watch(RequestLog())
    core.submit(make_request("r-1", range(10)))
    clock.sleep(1.5)
    core.cancel(make_request("r-1", range(10)).request_id)
    (line,) = lines(caplog.records)
    assert (line["outcome"], line["queue_s"], "prefill_s" in line) == ("aborted", 1.5, False)


def test_a_failed_step_names_its_requests(clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    core = sim_core(sim=replace(SIM, raise_every_steps=1), clock=clock)
    for name in ("r-1", "r-2"):
        core.submit(make_request(name, range(4)))
    core.step()
    (record,) = [record for record in caplog.records if "forward failed" in record.message]
    assert fields_of(record)["request_ids"] == ["r-1", "r-2"]


def test_spans_follow_one_another_under_the_senders(core: EngineCore, clock: VirtualClock) -> None:
    spans = Spans()
    core.watch(RequestTraces(spans, wall_clock_ns=lambda: 100 * SECOND + round(clock() * SECOND)))
    request = replace(make_request("r-1", range(10), max_tokens=3), traceparent=PARENT)
    core.submit(request, arrival_s=-2.0)
    run(core)
    assert [(name, parent) for name, parent, *_ in spans.told] == [
        ("queue", PARENT),
        ("prefill", PARENT),
        ("decode", PARENT),
    ]
    times = [(began_ns / SECOND, ended_ns / SECOND) for _, _, _, began_ns, ended_ns, _ in spans.told]
    assert times == [
        (pytest.approx(98.0), pytest.approx(100.0)),
        (pytest.approx(100.0), pytest.approx(100.2)),
        (pytest.approx(100.2), pytest.approx(100.42)),
    ]
    assert {attributes["request_id"] for _, _, attributes, *_ in spans.told} == {"r-1"}
    assert [error for *_, error in spans.told] == [None] * 3


def test_the_span_it_was_in_says_why_it_ended(core: EngineCore, clock: VirtualClock) -> None:
    spans = Spans()
    core.watch(RequestTraces(spans))
    core.submit(replace(make_request("r-1", range(10), max_tokens=9), traceparent=PARENT))
    core.step()
    clock.sleep(1.0)
    core.cancel(make_request("r-1", range(10)).request_id)
    assert [(name, error) for name, *_, error in spans.told] == [
        ("queue", None),
        ("prefill", None),
        ("decode", "aborted"),
    ]


def test_who_does_not_trace_gets_no_spans(core: EngineCore) -> None:
    spans = Spans()
    core.watch(RequestTraces(spans))
    core.submit(make_request("r-1", range(10)))
    run(core)
    assert not spans.told
