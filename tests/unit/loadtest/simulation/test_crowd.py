"""Simulated engines of one machine slow each other, and a router that prices it keeps them together."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from cache.events import StepTimeModel
from loadtest.simulation.cell import CellResult
from loadtest.simulation.crowd import Crowd, Pace
from loadtest.simulation.machine import H100_8B, SharedMachine
from loadtest.simulation.run import simulate
from loadtest.simulation.saturation import saturation_rate_per_s
from tests.fakes.simulation import MACHINE, spec, unrelated

MODEL = StepTimeModel(0.01, 0.001, 1e-6, 0.002)


def shared(num_engines: float) -> SharedMachine:
    return SharedMachine(**asdict(MACHINE), num_engines=num_engines)


def test_steps_take_as_much_longer_as_engines_are_too_many() -> None:
    crowd = Crowd(1.5)
    one, other = Pace(MODEL, 0, crowd), Pace(MODEL, 1, crowd)
    assert one.step() == MODEL
    assert other.step().base_s == pytest.approx(0.01 * 2 / 1.5)
    one.rests()
    assert other.step() == MODEL
    assert MODEL.base_s < other.fitted.base_s < 0.011, "the mean of what it saw"
    assert Pace(MODEL, 0, None).step() is MODEL


def test_two_engines_of_one_core_take_twice_as_long_at_one_time_and_no_longer_by_turns() -> None:
    together, apart = unrelated((0.0, 32, 9), (0.0, 32, 9)), unrelated((0.0, 32, 9), (100.0, 32, 9))
    alone = simulate(together, spec())
    crowded = simulate(together, spec(machine=shared(1.0)))
    assert sorted(crowded.replica) == [0, 1]
    # The first step of the first begins before the second does.
    assert max(crowded.ttft_s) == pytest.approx(2 * max(alone.ttft_s))
    assert max(crowded.e2e_s) == pytest.approx(2 * max(alone.e2e_s), rel=0.1)
    assert simulate(apart, spec(machine=shared(1.0))).e2e_s.tolist() == pytest.approx(alone.e2e_s.tolist())
    assert simulate(together, spec(machine=shared(2.0))).e2e_s.tolist() == pytest.approx(alone.e2e_s.tolist())


# Questions of two blocks with answers of forty tokens, three in a second: each takes a core 0.6 s alone.
LONG_ANSWERS = unrelated(*((turn / 3, 32, 40) for turn in range(60)))


def answered(crowding: float) -> CellResult:
    return simulate(
        LONG_ANSWERS,
        spec(
            policy="expected_time",
            policy_options=(("crowding", crowding),),
            num_replicas=4,
            machine=shared(1.0),
            event_delay_s=0.001,
        ),
    )


def test_long_answers_are_kept_together_where_engines_share_a_core() -> None:
    apart, together = answered(0.0), answered(1.0)
    assert together.mean_ttft_s < 0.8 * apart.mean_ttft_s
    assert together.mean_e2e_s < 0.8 * apart.mean_e2e_s


def test_the_ideal_computes_on_the_same_machine() -> None:
    together = unrelated((0.0, 32, 9), (0.0, 32, 9))
    alone, crowded = [
        simulate(together, spec(policy="ideal", machine=each)).e2e_s.max() for each in (MACHINE, shared(1.0))
    ]
    assert crowded == pytest.approx(2 * alone, rel=0.1)


def test_load_counts_what_the_machine_computes() -> None:
    work = unrelated((0.0, 32, 5))
    fleet = {"num_replicas": 4, "cache_tokens": 80}
    [own, half, more] = [
        saturation_rate_per_s(work, **fleet, machine=each) for each in (MACHINE, shared(2.0), shared(9.0))
    ]
    assert (half, more) == pytest.approx((own / 2, own))


def test_cells_of_other_machines_keep_their_names() -> None:
    assert "engines" not in repr(spec(machine=H100_8B))
    assert spec(machine=shared(1.0)).digest() != spec().digest()


def test_a_machine_computes_one_engine_at_least() -> None:
    with pytest.raises(ValueError, match=r"num_engines = 0\.5 is less than 1"):
        shared(0.5)
