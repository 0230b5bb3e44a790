"""A plan is carried out in turns, everybody is asked the same, and whatever ends it, what ran is there."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from loadtest.__main__ import main
from loadtest.client.answer import Answer, Failure
from loadtest.client.endpoint import Endpoint
from loadtest.client.errors import Unreachable
from loadtest.commands import serving
from loadtest.comparison import experiment as module
from loadtest.comparison.caveats import caveats
from loadtest.comparison.contender import Contender
from loadtest.comparison.errors import BrokenAnswers, NoAnswers
from loadtest.comparison.estimates import geometric
from loadtest.comparison.experiment import Experiment, Observer
from loadtest.comparison.load import Load, Look, Sent, is_lost, is_met
from loadtest.comparison.plan import Cell, Plan, Search
from loadtest.comparison.report import report
from loadtest.comparison.results import Results, Run, read
from loadtest.comparison.tables import tables
from loadtest.open_loop.tally import Tally, Targets
from loadtest.placement.errors import Stopped
from loadtest.placement.intervals import Interval
from loadtest.workloads.errors import WorkloadError
from loadtest.workloads.reference import WorkloadRef
from loadtest.workloads.request import Workload
from tests.fakes.simulation import request

CHATS = WorkloadRef("multi_turn", (("think_s", 1.0), ("turns", 3.0)))
CONTENT = {"applications": [{"import_path": "deploy.app:build", "args": {}}]}
NAMES = ("a", "b", "c")


def plan(*, cells: bool = True, search: bool = False, repeats: int = 2) -> Plan:
    return Plan(
        contenders=tuple(Contender(name, CONTENT) for name in NAMES),
        cells=(Cell(CHATS, 4.0, 10.0),) if cells else (),
        searches=(Search(CHATS, 4.0, 10.0),) if search else (),
        repeats=repeats,
        seed=7,
        targets=Targets(ttft_s=1.0),
    )


class Servers:
    """In place of deployments: each answers all it is sent, up to its own rate in time."""

    def __init__(self, capacities: dict[str, float]) -> None:
        self.capacities = capacities
        self.started: list[str] = []
        self.running: str | None = None
        self.sent: list[tuple[str, Load]] = []
        self.interrupt_at: int | None = None
        self.fails = False
        self.on_their_way = 0  # of the last requests when it is stopped
        self.gone: str | None = None  # who answers nothing
        self.some_fail: Failure | None = None  # how the last answer of each run fails
        self.stands_still = False  # while it is first searched at a rate
        self._stood_still: set[tuple[str, float]] = set()

    @contextlib.contextmanager
    def start(self, contender: Contender) -> Iterator[str]:
        assert self.running is None, "two servers at a time measure each other"
        self.running = contender.label
        self.started.append(contender.label)
        try:
            yield f"http://{contender.label}"
        finally:
            self.running = None

    def send(self, endpoint: Endpoint, load: Load, look: Look) -> Sent:
        assert self.running is not None
        self.sent.append((self.running, load))
        tally = Tally(targets=load.targets, counted_from_s=load.counted_from_s)
        rate = (len(load.arrivals) - 1) / (load.arrivals[-1].due_s or 1.0)
        ttft_s = 0.1 if rate <= self.capacities[self.running] else 5.0
        moment = (self.running, rate)
        if load.ends_when_lost and self.stands_still and moment not in self._stood_still:
            self._stood_still.add(moment)
            ttft_s = 5.0
        fails = self.fails or self.gone == self.running
        stops = self.interrupt_at == len(self.sent)
        arrivals = load.arrivals[: len(load.arrivals) // 2 if stops else None]
        for index, arrival in enumerate(arrivals):
            tally.sent(arrival.due_s, 0.0)
            if not stops or index < len(arrivals) - self.on_their_way:
                tally.answered(arrival.due_s, 0.0, answer(ttft_s, Failure.STATUS if fails else None))
        if self.some_fail is not None:
            last = load.arrivals[-1]
            tally.sent(last.due_s, 0.0)
            tally.answered(last.due_s, 0.0, answer(ttft_s, self.some_fail))
        look(tally, tally.due, 0)
        return Sent(tally, is_whole=not stops, was_interrupted=stops)


def answer(ttft_s: float, failure: Failure | None = None) -> Answer:
    return Answer(
        0, ttft_s, ttft_s, (), 64, 32, 1, "r", ("stop",), ("x",), 200, failure, "broken" * bool(failure)
    )


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    fleet = Servers({"a": 16.0, "b": 8.0, "c": 2.0})
    monkeypatch.setattr(module, "send", fleet.send)
    monkeypatch.setattr(Endpoint, "find", lambda url, **_: Endpoint(url, "tiny"))
    return fleet


def experiment(servers: Servers, of: Plan) -> Experiment:
    return Experiment(of, servers.start, Observer(), {"command": "test"})


def test_repeats_are_interleaved_and_somebody_else_is_first(servers: Servers) -> None:
    results = experiment(servers, plan()).run()
    assert servers.started == ["a", "b", "c", "b", "c", "a"]
    assert [(run.contender, run.repeat, run.seed) for run in results.runs] == [
        *(("a", 0, 7), ("b", 0, 7), ("c", 0, 7)),
        *(("b", 1, 8), ("c", 1, 8), ("a", 1, 8)),
    ]


def test_everybody_is_asked_the_same_in_one_repeat_and_nothing_twice(servers: Servers) -> None:
    experiment(servers, plan()).run()
    measured = [
        (name, load) for index, (name, load) in enumerate(servers.sent) if index % 2
    ]  # each warms first
    questions = [[load.question(arrival).body for arrival in load.arrivals] for _, load in measured]
    assert questions[0] == questions[1] == questions[2]
    assert questions[3] == questions[4] == questions[5]
    assert questions[0] != questions[3]
    warm = servers.sent[0][1]
    warmed = {tuple(warm.question(arrival).body["prompt"][:16]) for arrival in warm.arrivals}
    assert not warmed & {tuple(body["prompt"][:16]) for body in questions[0]}


def test_a_search_finds_what_each_server_can_take(servers: Servers) -> None:
    results = experiment(servers, plan(cells=False, search=True)).run()
    for name, capacity in servers.capacities.items():
        rates = [found.rate_per_s for found in results.found if found.contender == name]
        assert len(rates) == 2
        # To the search's precision, and the half percent that a window's own rate may be off.
        assert all(0.92 * capacity <= rate <= 1.01 * capacity for rate in rates), (name, rates)
    assert {run.kind for run in results.runs} == {"search"}


def test_a_moment_that_stood_still_is_not_taken_for_a_rate_too_high(servers: Servers) -> None:
    wanted = experiment(servers, plan(cells=False, search=True, repeats=1)).run().found
    servers.stands_still = True
    servers.sent.clear()
    assert experiment(servers, plan(cells=False, search=True, repeats=1)).run().found == wanted
    tries = [load for name, load in servers.sent if name == "c" and load.ends_when_lost]
    begun = [tuple(load.question(load.arrivals[0]).body["prompt"]) for load in tries]
    assert len(set(begun)) == len(begun), "what a try has computed must not help the next one"


@pytest.mark.parametrize("rate_per_s", [0.25, 4.0, 100.0])
def test_enough_requests_of_a_try_count_at_any_rate(rate_per_s: float) -> None:
    cell = Search(CHATS, 4.0, 10.0).cell(rate_per_s)
    assert cell.num_requests - cell.num_warming >= 200
    assert cell.seconds >= 10.0


def test_of_a_try_half_only_warms_the_caches_and_of_a_cell_an_eighth(servers: Servers) -> None:
    experiment(servers, plan(search=True, repeats=1)).run()
    _warming, cell, *tries = [load for name, load in servers.sent if name == "a"]
    assert cell.num_counted == round(len(cell.arrivals) * 7 / 8)
    assert tries
    assert all(each.num_counted == len(each.arrivals) - round(len(each.arrivals) / 2) for each in tries)


def test_ctrl_c_keeps_what_ran_and_stops_the_server(servers: Servers) -> None:
    servers.interrupt_at = 4  # while b is measured
    results = experiment(servers, plan()).run()
    assert results.was_stopped
    assert servers.running is None
    assert [(run.contender, run.is_whole) for run in results.runs] == [("a", True), ("b", False)]
    assert results.fixed("b", CHATS.label, 4.0) == []
    assert results.cut_short == results.runs[-1]


def test_what_was_cut_short_is_shown_as_such_and_its_requests_add_up(servers: Servers) -> None:
    """Its row was nowhere, those on their way made its goodput less, and repeats counted what had begun."""
    servers.interrupt_at = 4  # while b is measured
    servers.on_their_way = 3
    results = experiment(servers, plan()).run()
    run = results.runs[-1]
    assert run.tally.unanswered == 3
    assert run.tally.goodput_per_s == pytest.approx((run.tally.due - 1) / run.tally.counted_s)
    whole, cut = tables(results)[0].rows
    assert (whole[0], cut[0], cut[1]) == ("a", "b, cut short", str(run.tally.answers))
    told = caveats(results)[0]
    assert "Stopped before the end" in told
    assert (
        f"b, {CHATS.label} at 4/s was cut short in repeat 1: {run.tally.due} requests sent, "
        f"{run.tally.answers} answered, 0 failed, and 3 on their way, which count as neither."
    ) in told


def test_a_repeat_that_was_cut_short_is_left_out_beside_whole_ones(servers: Servers) -> None:
    servers.interrupt_at = 8  # while b is measured again
    results = experiment(servers, plan()).run()
    assert [row[0] for row in tables(results)[0].rows] == ["a", "b", "c"]
    assert results.num_repeats == 1
    assert "was cut short in repeat 2" in caveats(results)[0]
    assert "No table has it." in caveats(results)[0]


def test_a_try_that_was_lost_before_it_was_stopped_is_not_told_as_cut_short(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(endpoint: Endpoint, load: Load, look: Look) -> Sent:
        if len(servers.sent) == 3:
            raise KeyboardInterrupt
        sent = servers.send(endpoint, load, look)
        return replace(sent, is_whole=not load.ends_when_lost)

    monkeypatch.setattr(module, "send", send)
    results = experiment(servers, plan(cells=False, search=True)).run()
    assert [run.is_whole for run in results.runs] == [False, False]
    assert results.was_stopped
    assert results.cut_short is None


def test_what_was_stopped_before_an_answer_is_no_run(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.interrupt_at, servers.on_their_way = 2, 1000
    with pytest.raises(Stopped, match="stopped: nothing had been answered yet"):
        _carried_out(servers, plan(), tmp_path / "out", monkeypatch)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "error",
    [
        Unreachable("http://b", "gone"),
        WorkloadError("no window"),
        OSError(28, "No space left on device", "/tmp/wp1"),
    ],
)
def test_whatever_ends_it_early_the_report_has_what_ran_and_says_so(
    error: Exception, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(url: str, **_: object) -> Endpoint:
        if url == "http://b":
            raise error
        return Endpoint(url, "tiny")

    monkeypatch.setattr(Endpoint, "find", find)
    monkeypatch.setattr(serving, "_started", lambda *_: servers.start)
    monkeypatch.setattr(serving, "check", lambda contender: None)
    options = argparse.Namespace(out=tmp_path / "out", no_plots=True, start_limit=240.0)
    with pytest.raises(type(error)):
        serving.carry_out(plan(), options, Console(file=io.StringIO()), ["compare"])
    assert servers.running is None
    assert [run.contender for run in read(tmp_path / "out" / "results.json").runs] == ["a"]
    told = (tmp_path / "out" / "report.md").read_text()
    assert "- seeds: 7\n" in told
    assert told.startswith(f"**Ended by an error before the end: only what ran is shown. {error}**")


def test_what_ended_it_is_told_beside_a_report_that_cannot_be_written(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers.gone = "b"
    folder = tmp_path / "out"

    def run(options: argparse.Namespace, console: Console) -> None:
        monkeypatch.setattr(serving, "check_folder", lambda path: path.touch())  # and nothing fits below it
        _carried_out(servers, plan(), folder, monkeypatch)

    monkeypatch.setattr("loadtest.commands.compare.run", run)
    assert main(["compare"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("loadtest: b, warming: none of")
    assert told[1].startswith(f"loadtest: the report cannot be written to {folder}")


def _carried_out(servers: Servers, of: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_started", lambda *_: servers.start)
    monkeypatch.setattr(serving, "check", lambda contender: None)
    options = argparse.Namespace(out=folder, no_plots=True, start_limit=240.0)
    serving.carry_out(of, options, Console(file=io.StringIO()), ["compare"])


def test_answers_that_were_not_whole_end_it_with_an_error_after_the_report(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that a server was too busy for, and not those of rates that are tried until they fail."""
    servers.some_fail = Failure.BUSY
    _carried_out(servers, plan(), tmp_path / "busy", monkeypatch)
    servers.some_fail = Failure.CUT
    _carried_out(servers, plan(cells=False, search=True), tmp_path / "search", monkeypatch)
    searched = read(tmp_path / "search" / "results.json")
    number = len(searched.runs)
    wanted = (
        f"Answers broke in {number} of {number} runs that searched for a rate, at worst 1 connection cut (a, "
    )
    assert any(told.startswith(wanted) for told in caveats(searched))
    with pytest.raises(BrokenAnswers) as caught:
        _carried_out(servers, plan(), tmp_path / "cut", monkeypatch)
    runs = read(tmp_path / "cut" / "results.json").runs
    assert [run.contender for run in runs] == ["a", "b", "c", "b", "c", "a"]
    assert all(run.tally.failures for run in runs)
    num_sent = sum(run.tally.num_sent for run in runs)
    assert str(caught.value) == (
        f"6 of {num_sent} answers not whole. a, 2 connection cut: broken; b, 2 connection cut: broken; "
        "c, 2 connection cut: broken"
    )


def test_a_server_that_answers_nothing_ends_it_with_what_it_said(servers: Servers) -> None:
    servers.fails = True
    with pytest.raises(NoAnswers, match=r"a, warming: none of .* broken"):
        experiment(servers, plan()).run()
    assert servers.running is None


def test_a_server_that_is_gone_has_no_highest_rate(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A try is given up as soon as it is lost; then again at a lower rate, down to none that is kept."""

    def send(endpoint: Endpoint, load: Load, look: Look) -> Sent:
        if not load.ends_when_lost:
            return servers.send(endpoint, load, look)
        tally = Tally(targets=load.targets)
        for arrival in load.arrivals[:20]:
            tally.sent(arrival.due_s, 0.0)
            tally.answered(arrival.due_s, 0.0, answer(0.0, Failure.UNREACHABLE))
        return Sent(tally, is_whole=False)

    monkeypatch.setattr(module, "send", send)
    going = experiment(servers, plan(cells=False, search=True))
    with pytest.raises(NoAnswers, match=r"a, .* none of 20 requests .* no connection"):
        going.run()
    assert not going.results.found


def test_replicas_that_answer_nothing_are_part_of_the_imbalance(servers: Servers) -> None:
    four = {"import_path": "deploy.app:build", "deployments": [{"name": "Replica", "num_replicas": 4}]}
    content = {"applications": [four]}
    of = replace(plan(repeats=1), contenders=(Contender("a", content), Contender("b", CONTENT)))
    experiment(servers, of).run()
    assert [load.num_replicas for _, load in servers.sent] == [4, 4, 1, 1]
    tally = Tally(num_replicas=4)
    tally.answered(0.0, 0.0, answer(0.1))
    assert tally.imbalance == 4.0  # all of it on one


def test_addresses_with_brackets_are_told_whole(tmp_path: Path) -> None:
    """Rich takes [fd00::1] for a style."""
    url, tally, out = "http://[fd00::1]:8000", Tally(), io.StringIO()
    tally.sent(0.0, 1.0)
    tally.answered(0.0, 1.0, answer(0.1))
    run = Run(url, "made", 1.0, 0, 0, "fixed", 0.5, tally)
    results = Results({}, (url,), {url: "tiny"}, Targets(), (run,))
    report(results, tmp_path, Console(file=out, width=200), with_plots=False)
    assert f"at worst 1 s ({url}, made at 1/s)" in out.getvalue()


def results_of(**tallies: Tally) -> Results:
    """One run of each, at one rate of one workload."""
    runs = tuple(Run(who, "made", 1.0, 0, 0, "fixed", 0.5, tally) for who, tally in tallies.items())
    return Results({}, tuple(tallies), dict.fromkeys(tallies, "tiny"), Targets(), runs)


def test_whose_requests_are_refused_is_not_sooner_without_a_word() -> None:
    """Times are of answers, so refusing half of the requests leaves only those that were quick."""
    some, everybody = Tally(), Tally()
    for index in range(10):
        for tally in (some, everybody):
            tally.sent(float(index), 0.0)
        some.answered(float(index), 0.0, answer(0.1, Failure.BUSY if index % 2 else None))
        everybody.answered(float(index), 0.0, answer(5.0 if index % 2 else 0.1))
    told = " ".join(caveats(results_of(some=some, everybody=everybody)))
    assert "in 1 of 2 runs more than 1.0 % of the requests had none, at worst 50.0 % (some, made" in told
    assert "had none" not in " ".join(caveats(results_of(everybody=everybody)))


def test_failures_of_what_only_warms_the_caches_are_told_and_an_error() -> None:
    """A replica that died in the first eighth was nowhere, nor what was missing from caches for it."""
    tally = Tally(counted_from_s=2.0)
    for second in range(4):
        tally.sent(float(second), 0.0)
        tally.answered(float(second), 0.0, answer(0.1, None if second else Failure.CUT))
    results = results_of(a=tally)
    assert tables(results)[0].rows[0][:3] == ("a", "2", "0")
    assert any("failed, at worst 1 connection cut (a, made at 1/s)" in told for told in caveats(results))
    with pytest.raises(BrokenAnswers, match=r"1 of 4 answers not whole\. a, 1 connection cut"):
        results.require_whole_answers()


def test_a_hit_rate_that_nobody_told_is_no_hit_rate_of_nothing() -> None:
    silent, cold = Tally(), Tally()
    silent.answered(0.0, 0.0, replace(answer(0.1), cached_tokens=None))
    cold.answered(0.0, 0.0, replace(answer(0.1), cached_tokens=0))
    table = tables(results_of(silent=silent, cold=cold))[0]
    place = table.columns.index("hit rate")
    assert [row[place] for row in table.rows] == ["", "0.0 %"]


def test_who_comes_at_one_instant_counts_together_for_the_ceiling_too(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first eighth of sixteen ends in the middle of five, of whom only the first can hit nothing."""
    requests = [
        request(3.0 * ((n + 4) // 5), 64, 1, range(4, 8) if n == 1 else range(4), n) for n in range(16)
    ]
    ticking = Workload("ticks", 16, tuple(requests))
    monkeypatch.setattr(module, "at_rate", lambda *_, **__: ticking)
    runs = experiment(servers, plan(repeats=1)).run().runs
    assert servers.sent[1][1].num_counted == 15
    assert runs[0].ceiling == (14 * 48) / (15 * 64)  # of fourteen all but the block with the last token


def test_a_mean_of_rates_of_which_one_is_nothing_is_nothing() -> None:
    """Not the thousandth part of the others, and no interval from nothing to 10^11."""
    for values in ([0.0, 4.0, 4.0], [0.0, 0.0], [0.0]):
        assert geometric(values) == Interval(0.0, 0.0, math.inf)
    found = geometric([4.0, 4.0])
    assert found is not None
    assert (found.low, found.high) == pytest.approx((4.0, 4.0))
    assert geometric([4.0, math.nan]) is None


def test_targets_are_met_by_99_of_100_and_lost_when_they_cannot_be_any_more() -> None:
    tally = Tally(targets=Targets(ttft_s=1.0))
    for index in range(100):
        tally.sent(float(index), 0.0)
    assert not is_lost(tally, 200)
    for index in range(99):
        tally.answered(float(index), 0.0, answer(0.5))
    assert is_met(tally)
    tally.answered(99.0, 0.0, answer(2.0))
    assert is_met(tally)
    assert not is_lost(tally, 100)
    tally.answered(98.0, 0.0, answer(0.5, Failure.BUSY))
    assert is_lost(tally, 100)
    assert not is_lost(tally, 200)
