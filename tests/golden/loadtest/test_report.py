"""The report of a recorded run: the tables, and a page that needs nothing from elsewhere.

After a change that is meant: `WARMPATH_WRITE_GOLDEN=1 python -m pytest tests/golden/loadtest`; read the diff.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest

from loadtest.client.answer import Answer, Failure
from loadtest.comparison.errors import ComparisonError
from loadtest.comparison.figures import pictures
from loadtest.comparison.page import page
from loadtest.comparison.report import markdown
from loadtest.comparison.results import Found, Results, Run, read, write
from loadtest.open_loop.tally import Tally, Targets

HERE = Path(__file__).parent
RECORDED, REPORT = HERE / "recorded_run.json", HERE / "report.md"


def made_up() -> Results:
    """Two contenders, two repeats, two rates: what the recorded run was written from."""
    runs, found = [], []
    for repeat in range(2):
        for contender, slowness in (("ours", 1.0), ("round_robin", 2.5)):
            for rate in (2.0, 4.0):
                draw = random.Random(f"{contender} {rate} {repeat}")
                tally = Tally(targets=Targets(ttft_s=1.0), counted_from_s=2.0)
                for index in range(round(rate * 12)):
                    due_s, late_s = index / rate, 0.001 * draw.random()
                    ttft_s = slowness * draw.uniform(0.1, 0.2) * rate
                    failure = Failure.BUSY if contender != "ours" and index == 20 else None
                    answer = Answer(
                        0.0,
                        ttft_s + 0.1,
                        ttft_s,
                        (0.04, 0.06),
                        100,
                        round(80 / slowness),
                        3,
                        f"r{index % 2}",
                        ("length",),
                        ("x",),
                        200,
                        failure,
                        "too busy" * bool(failure),
                    )
                    tally.sent(due_s, late_s)
                    tally.answered(due_s, late_s, answer)
                runs.append(Run(contender, "chats", rate, repeat, repeat, "fixed", 0.85, tally))
            found.append(Found(contender, "chats", repeat, 6.0 / slowness))
    return Results(
        {"command": 'python -m loadtest compare <a> & "b"', "machine": "a made-up one"},
        ("ours", "round_robin"),
        {"ours": "simulated steps, no model", "round_robin": "simulated steps, no model"},
        Targets(ttft_s=1.0),
        tuple(runs),
        tuple(found),
    )


@pytest.fixture(scope="module")
def recorded() -> Results:
    if os.environ.get("WARMPATH_WRITE_GOLDEN"):
        write(RECORDED, made_up())
        REPORT.write_text(markdown(read(RECORDED)))
    return read(RECORDED)


def test_the_tables_of_the_recorded_run(recorded: Results) -> None:
    assert markdown(recorded) == REPORT.read_text()


def test_what_is_written_is_what_is_read(recorded: Results, tmp_path: Path) -> None:
    write(tmp_path / "results.json", recorded)
    assert read(tmp_path / "results.json") == recorded
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_the_page_is_whole_escaped_and_fetches_nothing(recorded: Results) -> None:
    text = page(recorded, pictures(recorded))
    assert text == page(recorded, pictures(recorded))  # equal results, equal page
    assert text.startswith("<!doctype html>")
    assert text.rstrip().endswith("</html>")
    assert "&lt;a&gt; &amp; &quot;b&quot;" in text
    fetched = re.findall(r'(?:src|href|xlink:href)="(?!#)([^"]*)"|url\((?!#)([^)]*)\)|@import', text)
    assert not fetched
    assert "prefers-color-scheme: dark" in text
    figures = text.count("<svg")
    assert figures == 2 * 3 + 1  # per rate: distributions, over time, per replica; goodput once
    assert "var(--ink)" in text
    assert "var(--c2)" in text
    assert "#010203" not in text
    for part in ("time to first token", "gap between", "hit rate", "goodput", "a made-up one", "seeds"):
        assert part in text


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    for content in ("", "[]", '{"version": 99}', '{"version": 1}'):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ComparisonError, match=r"x\.json"):
            read(tmp_path / "x.json")
