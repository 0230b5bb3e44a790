"""Cases to rows, over contenders that answer at once with made-up times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cases import SMALL, FirstToken, Overhead, Plan, Throughput, Whole, exactly
from benchmarks.contender import Job, Run
from benchmarks.measure import Bench, cell_work, in_turn, usual_total
from benchmarks.pairs import Finding
from benchmarks.rows import Row
from benchmarks.spans import Span

PLAN = Plan(
    models=(replace(SMALL, name="132M"),),  # judged as the large one
    throughput=(Throughput(32, 128, 4),),
    first_token=(FirstToken(4096),),
    whole=(Whole(4, 257, 8),),
    overhead=(Overhead(2, 64, 4, 4),),
    pairs=exactly(3),
)


class FakeContender:
    """Takes `step_s` per step and `token_s` per computed prompt token; 90 % of the wall time is CPU."""

    def __init__(
        self,
        step_s: float,
        token_s: float,
        *,
        caching_cost: float = 0.0,
        salt: int = 0,
        decodes_beside: float = 0.0,
    ) -> None:
        self._step_s, self._token_s = step_s, token_s
        self._caching_cost, self._salt, self._decodes_beside = caching_cost, salt, decodes_beside
        self._cached: list[int] = []
        self.jobs: list[Job] = []

    def run(self, job: Job) -> Run:
        self.jobs.append(job)
        cached = 0
        if not job.is_cold:
            (prompt,) = job.prompts
            cached = next(i for i, token in enumerate(prompt) if token != self._cached[i])
        else:
            self._cached = list(job.prompts[0])
        slowdown = 1 + self._caching_cost * job.prefix_caching
        prefill_s = slowdown * self._token_s * sum(len(prompt) - cached for prompt in job.prompts)
        if job.output_tokens > 1:
            prefill_s *= 1 + self._decodes_beside
        steps = tuple(_span(slowdown * self._step_s) for _ in range(job.output_tokens - 1))
        return Run(
            outputs=tuple((sum(prompt) % 97 + self._salt,) for prompt in job.prompts),
            whole=_span(prefill_s + slowdown * self._step_s * (job.output_tokens - 1)),
            first_tokens=_span(prefill_s),
            steps=steps,
            every_step=(_span(prefill_s), *steps),
            cached_tokens=cached,
            host=_span(0.001),
            peak_bytes=len(job.prompts) << 20,
        )


def _span(seconds: float) -> Span:
    return Span(seconds, 0.9 * seconds)


def _rows(**contenders: FakeContender) -> dict[str, Row]:
    usual = {
        "warmpath": FakeContender(0.1, 0.001),
        "generate": FakeContender(0.12, 0.001),
        "continuous": FakeContender(0.35, 0.002),
    }
    work: list[float] = []
    (spec,) = PLAN.models
    bench = Bench(spec, PLAN, {**usual, **contenders}, lambda _, each: work.append(each))
    rows = {f"{row.section} | {row.label}": row for cell in PLAN.cells for row in bench.rows(cell)}
    planned = sum(cell_work(spec, PLAN, cell) for cell in PLAN.cells)
    assert sum(work) == pytest.approx(planned), "the progress bar ends at its end"
    return rows


def _row(rows: dict[str, Row], ending: str) -> Row:
    (row,) = [row for name, row in rows.items() if name.endswith(ending)]
    return row


def test_decode_is_measured_per_step_and_judged() -> None:
    row = _row(_rows(), "batch 32: steady decode")
    assert row.values["warmpath"].wall_s == pytest.approx(320)
    assert row.values["warmpath"].cpu_s == pytest.approx(320 / 0.9)
    assert row.ratios["generate"].cpu.estimate == pytest.approx(1.2)
    assert (row.ratios["generate"].num_pairs, row.ratios["continuous"].num_pairs) == (3, 2)
    assert [verdict.is_reached for verdict in row.verdicts] == [True, True]
    assert row.note == ""


def test_prefill_counts_prompt_tokens_and_peak_memory_is_the_largest() -> None:
    rows = _rows()
    assert _row(rows, "| batch 32: prefill").values["continuous"].wall_s == pytest.approx(500)
    assert _row(rows, "peak MiB").amounts == {"warmpath": 32.0, "generate": 32.0, "continuous": 32.0}


def test_prefill_has_nobody_decode_beside_it_and_the_burst_of_longer_answers_is_shown_too() -> None:
    """Ours alone: the others' first tokens come before anybody's second."""
    contender = FakeContender(0.1, 0.001, decodes_beside=0.25)
    rows = _rows(warmpath=contender)
    assert _row(rows, "| batch 32: prefill").ratios["generate"].cpu.estimate == pytest.approx(1.0)
    beside = _row(rows, "prefill, decodes beside")
    assert beside.note == "1.25x as long"
    assert set(beside.values) == {"warmpath"}
    assert {job.output_tokens for job in contender.jobs if len(job.prompts) == 32} == {1, 4}


def test_hits_are_compared_with_the_miss_of_the_same_repeat() -> None:
    rows = _rows()
    miss, half, most = (
        _row(rows, end) for end in ("4,096:  0 % hit", "50 % hit (2,048)", "90 % hit (3,686)")
    )
    assert miss.values["warmpath"].wall_s == pytest.approx(4096)  # milliseconds
    assert (half.note, most.note) == ("2.0x a miss", "10.0x a miss")
    assert [verdict.is_reached for verdict in (*miss.verdicts, *most.verdicts)] == [True, True]
    assert half.verdicts == ()


def test_whole_requests_have_all_three() -> None:
    row = _row(_rows(), "4 x 257 in, 8 out")
    assert row.values["warmpath"].wall_s == pytest.approx(4 * 257 * 0.001 + 7 * 0.1)
    assert set(row.ratios) == {"generate", "continuous"}


@pytest.mark.parametrize(("cost", "measured", "reached"), [(0.005, "+0.5 %", True), (0.02, "+2.0 %", False)])
def test_caching_is_judged_by_what_it_adds(cost: float, measured: str, reached: bool) -> None:
    contender = FakeContender(0.1, 0.001, caching_cost=cost)
    (verdict,) = _row(_rows(warmpath=contender), "| on").verdicts
    assert (verdict.measured, verdict.is_reached) == (measured, reached)


def test_other_tokens_than_generates_are_told() -> None:
    rows = _rows(warmpath=FakeContender(0.1, 0.001, salt=1))
    assert _row(rows, "batch 32: steady decode").note == "warmpath differs in 96/96"
    assert _row(rows, "0 % hit").note == "warmpath differs in 3/3"


def test_contenders_take_turns_in_another_order_each_time() -> None:
    assert [in_turn("abc", repeat) for repeat in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


class Drifting(FakeContender):
    """Each of its runs takes longer than the one before, by `drift` each."""

    def __init__(self, step_s: float, token_s: float, drifts: list[float]) -> None:
        super().__init__(step_s, token_s)
        self._drifts, self._usual = drifts, (step_s, token_s)

    def run(self, job: Job) -> Run:
        drift = self._drifts[len(self.jobs) % len(self._drifts)]
        self._step_s, self._token_s = (drift * each for each in self._usual)
        return super().run(job)


def test_what_slows_both_of_a_pair_is_in_neither_side() -> None:
    """The machine becomes three times as slow meanwhile: the pairs still agree, and so the cell is told."""
    drifts = [1.0, 2.0, 3.0]
    rows = _rows(warmpath=Drifting(0.1, 0.001, drifts), generate=Drifting(0.105, 0.001, drifts))
    ratio = _row(rows, "batch 32: steady decode").ratios["generate"]
    assert ratio.finding is Finding.AT_OR_ABOVE
    assert (ratio.cpu.low, ratio.cpu.high) == pytest.approx((1.05, 1.05))


def test_pairs_that_disagree_say_nothing() -> None:
    rows = _rows(warmpath=Drifting(0.1, 0.001, [1.0, 1.2, 0.9]), generate=FakeContender(0.105, 0.001))
    assert _row(rows, "batch 32: steady decode").ratios["generate"].finding is Finding.CANNOT_TELL


def test_ours_and_generate_follow_each_other_and_continuous_batching_comes_after() -> None:
    asked: list[str] = []

    class Listed(FakeContender):
        def __init__(self, name: str) -> None:
            super().__init__(0.1, 0.001)
            self._name = name

        def run(self, job: Job) -> Run:
            asked.append(self._name)
            return super().run(job)

    contenders = {name: Listed(name) for name in ("warmpath", "generate", "continuous")}
    Bench(PLAN.models[0], PLAN, contenders, lambda *_: None).rows(PLAN.throughput[0])
    pair = ["warmpath", "generate"]
    once = [*pair, "continuous", *reversed(pair), "continuous", *pair]
    assert asked == [*once, *once]  # prefill, then decode


def test_both_arms_and_all_contenders_get_the_same_prompts() -> None:
    ours, generate = FakeContender(0.1, 0.001), FakeContender(0.12, 0.001)
    _rows(warmpath=ours, generate=generate)
    cold = {(job.prompts[0].tobytes(), job.output_tokens) for job in ours.jobs if job.is_cold}
    assert {(job.prompts[0].tobytes(), job.output_tokens) for job in generate.jobs} <= cold


def test_a_disturbed_step_is_outvoted() -> None:
    quiet = [Span(1, 1), Span(2, 2)]
    assert usual_total([quiet, [Span(9, 9), Span(2, 2)], [Span(1, 1), Span(9, 9)]]) == Span(3, 3)
    with pytest.raises(ValueError, match="one number of steps"):
        usual_total([quiet, quiet[:1]])
