"""A disk that fills up costs a report's files and nothing else, and an older one does not pass for it."""

from __future__ import annotations

import errno
import io
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loadtest.client.answer import Answer
from loadtest.comparison.report import report
from loadtest.comparison.results import Results, Run
from loadtest.open_loop.tally import Tally, Targets
from loadtest.placement.errors import BadRequest, NotWritten
from loadtest.report_folder import check_folder, reporting, write_whole


def results() -> Results:
    tally = Tally()
    tally.sent(0.0, 0.0)
    tally.answered(0.0, 0.0, Answer(0, 1, 1, (), 64, 32, 1, "r", ("stop",), ("x",), 200))
    return Results({}, ("a",), {"a": "tiny"}, Targets(), (Run("a", "made", 1.0, 0, 0, "fixed", 0.5, tally),))


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more can be made."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)


@pytest.mark.usefixtures("full")
def test_tables_are_printed_though_no_file_can_be_written(tmp_path: Path) -> None:
    """A run of an hour ended in a traceback, and its numbers were nowhere."""
    out = io.StringIO()
    with pytest.raises(NotWritten, match=rf"{tmp_path} \(No space left on device\): what is printed above"):
        report(results(), tmp_path, Console(file=out, width=200), with_plots=False)
    assert "made at 1 requests/s" in out.getvalue()
    assert "Report: " not in out.getvalue()


@pytest.mark.usefixtures("full")
def test_an_earlier_report_does_not_pass_for_one_that_failed(tmp_path: Path) -> None:
    for name in ("results.json", "report.md", "report.html"):
        (tmp_path / name).write_text("of yesterday")
    with pytest.raises(NotWritten):
        report(results(), tmp_path, Console(file=io.StringIO()), with_plots=False)
    assert not list(tmp_path.iterdir())


def test_the_page_of_an_earlier_report_does_not_stay_beside_a_later_one(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("of yesterday")
    report(results(), tmp_path, Console(file=io.StringIO()), with_plots=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.md", "results.json"]


def test_a_disk_without_room_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty file has room on any."""

    class Full(io.BytesIO):
        def write(self, content: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Full())
    with pytest.raises(BadRequest, match=r"--out: nothing can be written to .*: No space left"):
        check_folder(tmp_path)


def test_what_was_written_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "made" / "file"
    write_whole(path, b"one")
    with pytest.raises(TypeError):
        write_whole(path, "two")  # type: ignore[arg-type]
    assert [each.read_bytes() for each in path.parent.iterdir()] == [b"one"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "below"
    with pytest.raises(NotWritten, match="file/below"), reporting(below):
        write_whole(below / "report.md", b"one")
