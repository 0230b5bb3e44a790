"""Own times of nested parts, by a clock that the work itself moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import step_profile
from benchmarks.cases import ModelSpec
from benchmarks.step_profile import PARTS, SHAPES, PartTimes, Profile, profile, table

MICRO = ModelSpec("micro", 64, 128, 2, 4, 2, 16, 500)


class Work:
    """Something to watch: each call takes as long as it says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.times = times = PartTimes(lambda: self.now)
        self.inner = times.watched(self._inner, "inner", is_whole=False)
        self.outer = times.watched(self._outer, "outer", is_whole=False)
        self.whole = times.watched(self._outer, "whole", is_whole=True)
        self.failing = times.watched(self._failing, "failing", is_whole=False)

    def _inner(self) -> None:
        self.now += 1.0

    def _outer(self) -> None:
        self.now += 10.0
        self.inner()
        self.inner()
        self.now += 5.0

    def _failing(self) -> None:
        self.now += 3.0
        raise ZeroDivisionError


def test_a_part_has_its_own_time_and_not_that_of_parts_inside() -> None:
    work = Work()
    with work.times.step() as step:
        work.now += 100.0
        work.outer()
        work.inner()
    assert step == {"else": 100.0, "outer": 15.0, "inner": 3.0}


def test_a_whole_part_takes_in_what_it_calls() -> None:
    work = Work()
    with work.times.step() as step:
        work.whole()
    assert step == {"else": 0.0, "whole": 17.0}


def test_nothing_is_watched_outside_a_step_and_steps_are_apart() -> None:
    work = Work()
    work.outer()
    with work.times.step() as first:
        work.inner()
    work.outer()
    with work.times.step() as second:
        pass
    assert (first, second) == ({"else": 0.0, "inner": 1.0}, {"else": 0.0})


def test_what_raises_has_its_time_too() -> None:
    work = Work()
    with work.times.step() as step:
        with pytest.raises(ZeroDivisionError):
            work.failing()
        work.inner()
    assert step == {"else": 0.0, "failing": 3.0, "inner": 1.0}


def test_a_part_that_nobody_computes_any_more_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_profile, "_steps", lambda *_: [[{step_profile.LINEAR: 1.0}]])
    with pytest.raises(RuntimeError, match="watched for attention, norms and the rest of the forward, sched"):
        profile(MICRO, SHAPES[:1], tmp_path, repeats=1)


def test_the_table_has_a_column_per_profile() -> None:
    parts = dict.fromkeys(PARTS, 0.0) | {step_profile.LINEAR: 0.03, step_profile.ATTENTION: 0.01}
    lines = table([Profile("9M", "decode", 7, parts, 0.041, 0.039)] * 2).splitlines()
    assert {line.count("|") for line in lines} == {4}
    assert "| linear layers | 30.0 (75 %) | 30.0 (75 %) |" in lines
    assert lines[-2] == "| step, not watched | 39.0 | 39.0 |"
