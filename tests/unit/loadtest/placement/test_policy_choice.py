"""What may be asked for by name, and what an error tells who asked for something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.placement.errors import BadRequest
from loadtest.placement.policy_choice import PolicyChoice, parse_policies
from loadtest.placement.suites import GridSpec
from loadtest.workloads.reference import WorkloadRef
from router.policies import POLICIES


def parse(text: str) -> PolicyChoice:
    return parse_policies([text])[-1]


def test_all_is_everybody_once_and_the_default_in_its_four_forms() -> None:
    chosen = parse_policies(["all", "round_robin"])
    labels = [choice.label for choice in chosen]
    assert labels[:3] == ["ideal", "ideal_shortest", "ideal_apart"]
    forms = [f"expected_time{form}" for form in ("", "+shortest", "+late", "+late+shortest")]
    assert labels[3:7] == forms
    assert sorted(labels[3:]) == sorted([*POLICIES, *forms[1:]])


def test_the_ideal_is_always_there() -> None:
    assert [choice.label for choice in parse_policies(["round_robin"])] == ["ideal", "round_robin"]
    assert [choice.label for choice in parse_policies(["ideal"])] == ["ideal"]


def test_knobs_of_policy_and_router() -> None:
    choice = parse("expected_time+late:near_tie=0.2,hold_window=8")
    assert choice.options == (("near_tie", 0.2),)
    assert choice.router_settings == (("binding", "late"), ("hold_window", 8))
    assert choice.label == "expected_time+late:near_tie=0.2,hold_window=8"
    assert parse(choice.label) == choice


@pytest.mark.parametrize("form", ["", "+late", "+shortest", "+late+shortest"])
def test_a_form_is_read_as_it_is_written(form: str) -> None:
    choice = parse(f"expected_time{form}:near_tie=0.2")
    assert (choice.is_late, choice.is_shortest_first) == ("late" in form, "shortest" in form)
    assert parse(choice.label) == choice


def test_the_engines_order_is_the_machines_unless_asked_for() -> None:
    grid = GridSpec(
        (WorkloadRef("multi_turn"),),
        tuple(parse_policies(["round_robin", "expected_time+late", "expected_time+shortest"])),
        replicas=(4,),
        loads=(0.6,),
        seeds=(0,),
    )
    orders = {policy.label: spec.machine.scheduling_order.value for _, policy, spec in grid.cells()}
    assert orders == {
        "ideal": "first_come",
        "round_robin": "first_come",
        "expected_time+late": "first_come",
        "expected_time+shortest": "shortest_preempting",
    }


def test_rivals_dispatch_at_once_whatever_the_routers_default() -> None:
    assert parse("power_of_two").router_settings == (("binding", "at_once"),)
    assert parse("ideal").router_settings == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nonsense", ["unknown policy", "expected_time", "round_robin", "ideal", "all"]),
        ("expected_time:nonsense=1", ["no knob 'nonsense'", "near_tie", "hold_window"]),
        ("round_robin:nonsense=1", ["no knob 'nonsense'", "hold_window"]),
        ("ideal:near_tie=1", ["no knob", "none"]),
        ("expected_time:near_tie", ["near_tie=value"]),
        ("expected_time:near_tie=much", ["near_tie must be a number", "much"]),
        ("expected_time:hold_window=1.5", ["hold_window must be a whole number"]),
        ("expected_time:near_tie=-1", ["near_tie", "between"]),
        ("expected_time:hold_window=0", ["hold_window", "between"]),
        ("expected_time:near_tie=0.1,near_tie=0.2", ["'near_tie'", "twice"]),
        ("expected_time+late:hold_window=8,near_tie=0.1,hold_window=8", ["'hold_window'", "twice"]),
        ("expected_time+early", ["+late"]),
        ("expected_time+shortest+late", ["+late", "+shortest"]),
        ("expected_time+late+late", ["+late"]),
        ("ideal+late", ["no ideal"]),
        ("ideal+shortest", ["no ideal"]),
    ],
)
def test_errors_name_what_there_is(text: str, told: list[str]) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(text)
    for part in told:
        assert part in str(caught.value)


def test_errors_in_a_file_name_its_line(tmp_path: Path) -> None:
    """A comment that is indented was an unknown policy, and nobody knew of which file."""
    file = tmp_path / "policies.txt"
    file.write_text("# tuned\n  # by hand\nexpected_time\n\nround_robim\n")
    with pytest.raises(BadRequest, match=r"policies\.txt, line 5: unknown policy 'round_robim'"):
        parse_policies([f"@{file}"])
