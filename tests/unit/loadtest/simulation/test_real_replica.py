"""Stretched steps: as long as so many times their own processor time, or as long as they took."""

from __future__ import annotations

import pytest

from loadtest.simulation.real_replica import StretchedRunner
from replica.engine.engine_core import EngineCore
from replica.runners.sim_runner import SimRunner
from tests.fakes.engine import BLOCK_SIZE, VirtualClock, make_request, sim_config, sim_core


class WaitingRunner(SimRunner):
    """Uses its step time of a core, and waits as long again for one `waits` times over."""

    def __init__(self, clock: VirtualClock, waits: float) -> None:
        super().__init__(sim_config().sim, block_size=BLOCK_SIZE, sleep=self._take)
        self.used_s = 0.0
        self._clock = clock
        self._waits = waits

    def _take(self, seconds: float) -> None:
        self.used_s += seconds
        self._clock.sleep(seconds * (1 + self._waits))

    def used(self) -> float:
        return self.used_s


def steps(stretch: float, waits: float, *, num_requests: int = 1) -> tuple[StretchedRunner, EngineCore]:
    clock = VirtualClock()
    inner = WaitingRunner(clock, waits)
    runner = StretchedRunner(inner, clock=clock, used=inner.used, sleep=clock.sleep)
    runner.stretch = stretch
    core = sim_core(runner=runner, clock=clock)  # type: ignore[arg-type]  # any Runner will do
    for number in range(num_requests):
        core.complete([make_request(f"r{number}", range(10 * number, 10 + 20 * number), max_tokens=5)])
    return runner, core


@pytest.mark.parametrize("waits", [0.0, 1.0, 3.0])
def test_waiting_for_a_core_disappears_in_the_stretch(waits: float) -> None:
    runner, _ = steps(4.0, waits)
    assert len(runner.steps) == 5
    for step in runner.steps:
        assert step.elapsed_s == pytest.approx(4.0 * step.used_s)


def test_waiting_longer_than_the_stretch_shows() -> None:
    runner, _ = steps(2.0, 3.0)
    for step in runner.steps:
        assert step.elapsed_s == pytest.approx(4.0 * step.used_s)


def test_the_engine_learns_the_stretched_time() -> None:
    """Its step-time fit, and so what routers are told, is of the slower machine."""
    _, fast = steps(1.0, 0.0, num_requests=12)
    _, slow = steps(3.0, 0.0, num_requests=12)
    quick, stretched = fast.load().step_time, slow.load().step_time
    assert quick is not None
    assert stretched is not None
    assert stretched.step_s(50, 1000.0, 3) == pytest.approx(3 * quick.step_s(50, 1000.0, 3), rel=1e-3)
