"""What `make bench-placement` compares: targets are for forms of the default policy, so each part has all."""

from __future__ import annotations

import pytest

from loadtest.placement.bench import PARTS, Bench, bench_specs
from loadtest.placement.policy_choice import OURS
from loadtest.workloads.reference import WorkloadRef


@pytest.mark.parametrize("name", PARTS)
def test_every_part_has_the_default_policy_in_every_form(name: str) -> None:
    (part,) = bench_specs(Bench(is_full=True, parts=(name,), cache_tokens=1_500_000), WorkloadRef("no_reuse"))
    assert set(OURS) <= set(part.spec.policies)


def test_without_arguments_it_is_small_enough_for_ten_minutes_and_has_intervals() -> None:
    (part,) = bench_specs(Bench(False, None, 1_500_000), WorkloadRef("conversation"))
    settings = {setting for setting, _, _ in part.spec.cells()}
    # Some 81 s a setting and seed of 27 policies on a slow machine of two cores.
    assert len(settings) * len(part.spec.seeds) <= 6
    assert len(settings) >= 2
    assert len(part.spec.seeds) >= 3
