"""Every policy gets the same number of settings; the best of them is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.placement.bench import PARTS, SEEDS, TUNING_SEEDS, Bench, bench_specs
from loadtest.placement.comparison import Comparison
from loadtest.placement.errors import BadRequest
from loadtest.placement.policy_choice import PolicyChoice, parse_policies
from loadtest.placement.suites import Setting
from loadtest.placement.summary import summarize
from loadtest.placement.tuning import pick, settings, table
from router.policies import POLICIES
from tests.fakes.placement import WORKLOAD, fake_result, fake_spec

IDEAL = PolicyChoice("ideal")


@pytest.mark.parametrize("policy", POLICIES)
def test_settings_are_ones_the_policy_takes(policy: str, tmp_path: Path) -> None:
    found = settings(policy, 10, seed=0)
    assert found == settings(policy, 10, seed=0)
    assert found[0] == PolicyChoice(policy)
    most = {"lmetric": 3}.get(policy, 10)  # that takes one thing, which is true or false
    assert len(set(found)) == len(found) == (most if POLICIES[policy].option_names else 1)
    # Written to a file and read again they are the same.
    path = tmp_path / "tuned.txt"
    path.write_text("# tuned\n\n" + "".join(f"{choice.label}\n" for choice in found))
    assert parse_policies([f"@{path}"]) == [IDEAL, *found]


def test_the_best_is_picked_and_the_default_if_none_is_better() -> None:
    default, worse, better = (
        PolicyChoice("round_robin"),
        PolicyChoice("power_of_two"),
        PolicyChoice("expected_time"),
    )
    made = Comparison()
    for choice in (IDEAL, default, worse, better):
        for seed in (0, 1):
            spec = fake_spec(choice.name, seed=seed)
            made.add(Setting("made", 1, 1, 4, 0.5), choice, seed, summarize(fake_result(spec), 4))
    found = pick(made, IDEAL, [default, worse, better])
    assert (found.best, found.num_settings) == (better, 3)
    assert (found.default_ratio, found.best_ratio) == pytest.approx((2.0, 1.1))
    assert pick(made, IDEAL, [better, default]).best == better
    assert table([found]).rows[0][:4] == ("round_robin", "2.000", "1.100", "3")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"none\.txt"):
        parse_policies([f"@{tmp_path / 'none.txt'}"])


class TestBench:
    def test_all_parts_of_the_full_comparison_can_be_made(self) -> None:
        parts = list(bench_specs(Bench(True, None, 400_000), WORKLOAD))
        assert [part.name for part in parts] == list(PARTS)
        for part in parts:
            assert part.spec.cache_tokens == (400_000,)
            assert part.spec.replicas == (4, 16, 64)
            assert len(part.spec.seeds) >= 5
            assert part.spec.cells()

    def test_the_default_is_the_trace_alone(self) -> None:
        (part,) = bench_specs(Bench(False, None, 1_500_000), WORKLOAD)
        assert part.name == "conversation"
        assert {policy.name for policy in part.spec.policies} >= set(POLICIES)

    def test_nothing_is_reported_on_what_it_was_tuned_on(self) -> None:
        assert not set(SEEDS) & set(TUNING_SEEDS)
