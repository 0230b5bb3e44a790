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
