"""Machines that are alike are used alike, whatever their fits say within noise; others are not."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from cache.events import StepTimeModel
from cache.types import ReplicaId
from router.placement.routing import Routing
from router.pricing.speeds import mean_of, speeds_of
from tests.fakes.router import STEP_TIME, FakeClock, config, info, load, query, replica_id

PER_REPLICA = 24  # prompts


def scaled(model: StepTimeModel, base: float, per_token: float, per_sequence: float) -> StepTimeModel:
    return StepTimeModel(
        model.base_s * base, model.per_token_s * per_token, 0.0, model.per_sequence_s * per_sequence
    )


NOISE = st.floats(0.9, 1.1)
JITTERED = st.builds(lambda *times: scaled(STEP_TIME, *times), NOISE, NOISE, NOISE)


class OneAfterTheOther:
    """Unique cold prompts, each over before the next one comes; replicas report now and then."""

    def __init__(self, fits: list[StepTimeModel], peers: tuple[int, int] = (0, 1)) -> None:
        self.clock = FakeClock()
        self.routing = Routing(config(), clock=self.clock, peers=lambda: peers)
        self.fits = fits
        self.routing.update_replicas({replica_id(index): info() for index in range(len(fits))})
        self.went: Counter[ReplicaId] = Counter()

    def report(self) -> None:
        for index, fit in enumerate(self.fits):
            self.routing.on_load(replica_id(index), load(step_time=fit))

    def send(self, count: int, between_s: float = 0.05) -> None:
        for number in range(count):
            if number % 8 == 0:
                self.report()
            placement = self.routing.choose(query(f"{sum(self.went.values())}-{number}"))
            self.went[placement.replica_id] += 1
            self.routing.finish(placement.request_id)
            self.clock.advance(between_s)


@settings(max_examples=30)
@given(fits=st.lists(JITTERED, min_size=2, max_size=9), data=st.data())
def test_equal_machines_get_equal_parts_whatever_their_fits_say_within_noise(
    fits: list[StepTimeModel], data: st.DataObject
) -> None:
    fleet = OneAfterTheOther(fits)
    for _ in range(2):
        fleet.send(PER_REPLICA * len(fits) // 2)
        index = data.draw(st.integers(0, len(fits) - 1))
        fleet.fits[index] = data.draw(JITTERED)
    even = sum(fleet.went.values()) / len(fits)
    assert max(fleet.went.values()) <= 1.3 * even + 1


@settings(max_examples=30)
@given(fits=st.lists(JITTERED, min_size=1, max_size=6), times=st.floats(2.0, 20.0))
def test_a_slower_machine_gets_at_most_its_part(fits: list[StepTimeModel], times: float) -> None:
    fleet = OneAfterTheOther([scaled(STEP_TIME, times, times, times), *fits])
    fleet.send(PER_REPLICA * (len(fits) + 1))
    assert fleet.went[replica_id(0)] <= PER_REPLICA / times + 1


@given(
    fits=st.lists(
        st.builds(lambda times: scaled(STEP_TIME, times, times, times), st.floats(0.1, 10.0)), max_size=12
    )
)
def test_every_fit_is_of_one_speed_and_within_what_its_members_take(fits: list[StepTimeModel]) -> None:
    by_name = {replica_id(index): fit for index, fit in enumerate(fits)}
    found = speeds_of(by_name, lambda fit: fit.step_s(500, 0.0, 1), {}, {})
    assert sorted(name for speed in found for name in speed.members) == sorted(by_name)
    for speed in found:
        members = [by_name[name] for name in speed.members]
        taken = [fit.step_s(500, 0.0, 1) for fit in members]
        assert min(taken) * (1 - 1e-9) <= speed.model.step_s(500, 0.0, 1) <= max(taken) * (1 + 1e-9)
        assert max(taken) <= 1.25**2 * min(taken) * (1 + 1e-9)
        assert mean_of(members[:1]) == members[0]
