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
    wait: int = 0  # for a first token, from `STOPS_AT_MIN` on
    begins: bool = False  # first tokens go on coming
    is_new: bool = False  # no first token was ever seen, so there is no such series

    def series(self) -> dict[str, str]:
        """In promtool's notation: how often each value is repeated, or added."""
        before, after = 4 * STOPS_AT_MIN, 4 * 10
        waits_before = 0 if self.is_new else 1
        goes_on, stops = f"0+5x{before + after}", f"0+5x{before} {5 * before}x{after}"
        told = {
            'warmpath_requests_without_token{router="r"}': f"{waits_before}x{before} {self.wait}x{after}",
        }
        if not self.is_new:
            first = 'warmpath_time_to_first_token_seconds_count{endpoint="completions",router="r"}'
            told[first] = goes_on if self.begins else stops
        return told


STORIES = (
    Story("nothing comes", fires=False),
    Story("all are served", fires=False, wait=9, begins=True),
    Story("nobody gets a first token", fires=True, wait=3),
    Story("nobody ever got one", fires=True, wait=1, is_new=True),
)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_somebody_is_woken_when_nobody_gets_a_first_token(story: Story, tmp_path: Path) -> None:
    """A histogram of first tokens says nothing of those that never come. Five minutes after the last one, and
    three after the first that waits where there was none."""
    at_min = {4: False, 7: False, 9: story.is_new, 11: story.fires}
    assert_fires("WarmpathNoFirstToken", story.series(), at_min, tmp_path)


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
    series = {name: values, 'warmpath_replicas{router="r"}': "1x80"}
    assert_fires("WarmpathNoReplica", series, {4: False, 6: False, 7: False, 9: fires, 11: fires}, tmp_path)


@pytest.mark.parametrize(
    ("refused", "fires"),
    [
        ("0x80", False),  # nobody comes: a first deployment that loads its weights
        ("0x24 1x56", True),
    ],
)
def test_one_client_is_enough_where_no_replica_comes_back(refused: str, fires: bool, tmp_path: Path) -> None:
    series = {
        'warmpath_requests_total{endpoint="completions",outcome="no_replica",router="r"}': refused,
        'warmpath_replicas{router="r"}': "1x20 0x60",
    }
    assert_fires("WarmpathNoReplica", series, {4: False, 6: False, 10: fires, 19: fires}, tmp_path)


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
