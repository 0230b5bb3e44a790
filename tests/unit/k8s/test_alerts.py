"""When alerts fire, and when they do not: promtool plays fleets to them, where it is installed."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from k8s.promql import alerts, has_promtool, rule_groups

pytestmark = pytest.mark.skipif(not has_promtool(), reason="promtool is not installed")

STOPS_AT_MIN = 5  # from then on there is no first token


@dataclass(frozen=True)
class Story:
    """Ten minutes of a fleet, scraped every fifteen seconds."""

    name: str
    fires: bool
    in_flight: int = 0  # from `STOPS_AT_MIN` on, as the next two
    held: int = 0
    waiting: int = 0  # in engines' queues
    writes: bool = False  # tokens go on coming
    begins: bool = False  # first tokens do
    is_new: bool = False  # no first token was ever seen, so there is no such series

    def series(self) -> dict[str, str]:
        """In promtool's notation: how often each value is repeated, or added."""
        before, after = 4 * STOPS_AT_MIN, 4 * 10
        goes_on, stops = f"0+5x{before + after}", f"0+5x{before} {5 * before}x{after}"
        told = {
            'warmpath_requests_in_flight{router="r"}': f"1x{before} {self.in_flight}x{after}",
            'warmpath_held_requests{router="r"}': f"0x{before} {self.held}x{after}",
            'vllm:num_requests_waiting{engine="e"}': f"0x{before} {self.waiting}x{after}",
            'warmpath_completion_tokens_total{router="r"}': goes_on if self.writes else stops,
        }
        if not self.is_new:
            first = 'warmpath_time_to_first_token_seconds_count{endpoint="completions",router="r"}'
            told[first] = goes_on if self.begins else stops
        return told


STORIES = (
    Story("nothing comes", fires=False),
    Story("all are served", fires=False, in_flight=9, held=5, writes=True, begins=True),
    Story("one long answer is written", fires=False, in_flight=1, writes=True),
    Story("only prompts are scored", fires=False, in_flight=3, begins=True),
    Story("an engine no longer says that its queue is empty", fires=False, waiting=2),
    Story("nothing moves", fires=True, in_flight=3, held=2),
    Story("nothing moves, and nobody says that it waits", fires=True, in_flight=1),
    Story("nothing has ever moved", fires=True, in_flight=1, is_new=True),
    Story("long answers leave the others no place, here", fires=True, in_flight=3, held=2, writes=True),
    Story("long answers leave the others no place, there", fires=True, in_flight=3, waiting=2, writes=True),
)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_somebody_is_woken_when_nobody_gets_a_first_token(story: Story, tmp_path: Path) -> None:
    """A histogram of first tokens says nothing of those that never come. Five minutes after the last one."""
    assert_fires("WarmpathNoFirstToken", story.series(), {4: False, 9: False, 11: story.fires}, tmp_path)


def assert_fires(
    alert: str, series: dict[str, str], at_min: dict[int, bool], folder: Path, **labels: str
) -> None:
    """Whether it does at these minutes. series: in promtool's notation, one value every 15 s. labels: what
    it tells of whom."""
    (rule,) = [each for each in alerts() if each["alert"] == alert]
    annotations = {
        key: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)
        for key, text in rule["annotations"].items()
    }
    told = {"exp_labels": rule["labels"] | labels, "exp_annotations": annotations}
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": [told] if fires else []}
            for minute, fires in at_min.items()
        ],
    }
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": rule_groups()}))
    (folder / "test.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "15s", "tests": [test]})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yaml"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("alert", "outcome"), [("WarmpathErrors", "failed"), ("WarmpathOverloaded", "busy")])
@pytest.mark.parametrize("refused", ["", "invalid", "limited", "not_found", "unauthorized"])
def test_who_is_refused_for_what_it_sends_hides_nobodys_trouble(
    alert: str, outcome: str, refused: str, tmp_path: Path
) -> None:
    """One in ten fails, beside a stranger who tries ten keys a second, say."""
    rates = {"ok": 90, outcome: 10, **({refused: 10_000} if refused else {})}
    series = {
        f'warmpath_requests_total{{endpoint="completions",outcome="{each}",router="r"}}': f"0+{rate}x80"
        for each, rate in rates.items()
    }
    assert_fires(alert, series, {1: False, 15: True}, tmp_path)


@pytest.mark.parametrize(
    ("values", "fires"),
    [
        ("0x20 3x60", False),  # the moment in which a rolling update of one replica has none
        ("0x20 1+1x60", True),
        ("0x20 1x5 2x5 3x5 4x5 5x5 6x5", True),  # one client, that comes every minute and a half
    ],
)
def test_one_moment_without_a_replica_wakes_nobody(values: str, fires: bool, tmp_path: Path) -> None:
    name = 'warmpath_requests_total{endpoint="completions",outcome="no_replica",router="r"}'
    alert = "WarmpathNoReplica"
    assert_fires(alert, {name: values}, {4: False, 6: False, 7: False, 9: fires, 11: fires}, tmp_path)


@pytest.mark.parametrize(
    ("values", "fires"), [("6x20 5x40", False), ("6x20 1x2 6x38", False), ("6x20 1x40", True)]
)
def test_a_deploy_that_failed_wakes_somebody(values: str, fires: bool, tmp_path: Path) -> None:
    name = 'ray_serve_application_status{application="warmpath",WorkerId="w"}'
    assert_fires(
        "WarmpathDeployFailed", {name: values}, {4: False, 8: fires}, tmp_path, application="warmpath"
    )


@pytest.mark.parametrize(
    ("values", "fires"), [("6x20 3x40 6x80", False), ("6x20 2x140", True), ("6x20 4x70 1x70", True)]
)
def test_replicas_that_stay_away_are_told(values: str, fires: bool, tmp_path: Path) -> None:
    """Not those of an update of ten minutes."""
    labels = {"application": "warmpath", "deployment": "Replica"}
    series = {
        'ray_serve_deployment_status{application="warmpath",deployment="Replica",WorkerId="w"}': values,
        'ray_serve_deployment_status{application="warmpath",deployment="Router",WorkerId="w"}': "6x160",
    }
    assert_fires("WarmpathNotWhole", series, {4: False, 15: False, 25: fires}, tmp_path, **labels)


@pytest.mark.parametrize(("values", "fires"), [("0x20 1x4 0x36", False), ("0x20 1x40", True)])
def test_keys_that_stay_unread_wake_somebody(values: str, fires: bool, tmp_path: Path) -> None:
    assert_fires("WarmpathKeysStale", {"warmpath_keys_stale": values}, {4: False, 12: fires}, tmp_path)


@pytest.mark.parametrize("alert", ["WarmpathErrors", "WarmpathOverloaded"])
def test_strangers_alone_wake_nobody(alert: str, tmp_path: Path) -> None:
    name = 'warmpath_requests_total{endpoint="completions",outcome="unauthorized",router="r"}'
    assert_fires(alert, {name: "0+10x80"}, {15: False}, tmp_path)
