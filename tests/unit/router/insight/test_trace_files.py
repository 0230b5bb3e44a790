"""The files of a recording: bounded, whole as far as they go, and never in a request's way."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from cache.errors import ConfigError
from loadtest.workloads.recording import read_recording
from router.insight.trace_files import FILE_PATTERN
from tests.fakes.recorder import Bench, lines


def test_files_are_rotated_and_their_total_bounded(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_file_bytes=1 << 16, max_total_bytes=4 << 16)
    bench.recorder.start()
    for number in range(1500):
        bench.serve(str(number), 40)
        if number % 200 == 199:
            time.sleep(0.02)  # let the thread breathe: this is about files, not about the queue
    bench.recorder.close()
    paths = sorted(tmp_path.glob(FILE_PATTERN))
    sizes = [path.stat().st_size for path in paths]
    assert bench.recorder.totals.written + bench.recorder.totals.dropped == 1500
    assert bench.recorder.totals.written > 500
    assert 2 <= len(paths) <= 5
    assert sum(sizes) <= 4 << 16
    assert max(sizes) <= 1 << 16
    assert all(json.loads(path.read_text().split("\n", 1)[0])["format"] == "warmpath-trace" for path in paths)
    assert read_recording(paths[-1]).requests


def test_what_another_router_writes_is_not_deleted(tmp_path: Path) -> None:
    """Its file is the oldest by its last line, and only what nobody writes makes room."""
    settings = {"max_file_bytes": 1 << 16, "max_total_bytes": 3 << 16}
    quiet, busy, ended = (Bench(tmp_path, **settings) for _ in range(3))
    for bench in (quiet, busy, ended):
        bench.recorder.start()
        bench.serve("one", 1)
        _until(lambda bench=bench: bench.recorder.totals.written == 1)
    ended.recorder.close()
    for number in range(300):
        busy.serve(str(number), 100)
        if number % 50 == 49:
            time.sleep(0.02)
    busy.recorder.close()
    quiet.serve("two", 1)
    quiet.recorder.close()
    assert (quiet.recorder.totals.written, quiet.recorder.totals.lost) == (2, 0)
    assert len(quiet.recorder.path.read_text().splitlines()) == 3
    assert not ended.recorder.path.exists()
    assert sum(path.stat().st_size for path in tmp_path.glob(FILE_PATTERN)) <= 3 << 16


def test_more_routers_than_there_is_room_for_go_on_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    benches = [Bench(tmp_path, max_file_bytes=1 << 16, max_total_bytes=1 << 16) for _ in range(2)]
    for bench in benches:
        bench.recorder.start()
        bench.serve("one", 1)
        _until(lambda bench=bench: bench.recorder.totals.written == 1)
    for bench in benches:
        bench.recorder.close()
    assert len(lines(tmp_path)) == 4
    assert [record.message for record in caplog.records] == ["recordings take more than max_total_bytes"]


def test_a_deleted_file_is_noticed_and_another_begun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was in it is counted as lost; what comes later is not written into nothing."""
    bench = Bench(tmp_path)
    bench.recorder.start()
    for number in range(2):
        bench.serve(str(number), 1)
    _until(lambda: bench.recorder.totals.written == 2)
    bench.recorder.path.unlink()
    bench.serve("later", 1)
    bench.recorder.close()
    assert (bench.recorder.totals.written, bench.recorder.totals.lost) == (3, 2)
    assert len(lines(tmp_path)) == 2
    assert [record.message for record in caplog.records] == ["a recording was deleted while it was written"]


def test_a_folder_that_was_tidied_up_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    bench = Bench(folder)
    bench.recorder.start()
    bench.serve("one", 1)
    _until(lambda: bench.recorder.totals.written == 1)
    shutil.rmtree(folder)
    bench.serve("two", 1)
    bench.recorder.close()
    assert (bench.recorder.totals.failed, bench.recorder.totals.lost) == (0, 1)
    assert len(lines(folder)) == 2
    assert folder.stat().st_mode & 0o077 == 0


def test_a_file_that_is_deleted_before_its_end_is_lost(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.recorder.start()
    bench.serve("one", 1)
    _until(lambda: bench.recorder.totals.written == 1)
    bench.recorder.path.unlink()
    bench.recorder.close()
    assert bench.recorder.totals.lost == 1


def test_a_line_longer_than_a_file_gets_one_of_its_own(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_file_bytes=1 << 16, max_total_bytes=1 << 20)
    bench.recorder.start()
    for name in ("a", "b"):
        bench.serve(name, 5000)
    bench.recorder.close()
    assert len(list(tmp_path.glob(FILE_PATTERN))) == 2
    assert bench.recorder.totals.written == 2


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "traces")
    bench.recorder.start()
    bench.serve("one", 1)
    bench.recorder.close()
    assert bench.recorder.path.stat().st_mode & 0o077 == 0


def test_a_full_queue_drops_rows_and_counts_them(tmp_path: Path) -> None:
    """Nobody reads the queue: the event loop must not wait for it."""
    bench = Bench(tmp_path)
    bench.recorder._thread = object()  # type: ignore[assignment]  # looks started
    for number in range(1030):
        bench.serve(str(number), 1)
    assert bench.recorder.totals.dropped == 6


def test_a_full_disk_loses_rows_not_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    bench.recorder.start()
    is_full = True
    files = bench.recorder._files
    append = files._append

    def fail(line: bytes) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(line)

    monkeypatch.setattr(files, "_append", fail)
    for number in range(5):
        bench.serve(str(number), 1)
    _until(lambda: bench.recorder.totals.failed == 5)
    assert not list(tmp_path.glob(FILE_PATTERN)), "a file without a line was left behind"
    is_full = False
    bench.serve("too early", 1)
    _until(lambda: bench.recorder.totals.failed == 6)
    bench.clock.advance(11.0)
    bench.serve("later", 1)
    bench.recorder.close()
    assert bench.recorder.totals.written == 1
    assert len(lines(tmp_path)) == 2


def test_a_disk_that_fills_in_the_middle_of_a_line_leaves_a_file_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a disk does it: what there is room for is written, and the rest is refused."""
    bench = Bench(tmp_path)
    bench.recorder.start()
    for number in range(3):
        bench.serve(f"kept {number}", 1)
    _until(lambda: bench.recorder.totals.written == 3)
    files = bench.recorder._files

    def half(line: bytes) -> None:
        assert files._file is not None
        files._file.write(line[: len(line) // 2])
        files._file.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "_append", half)
    bench.serve("too much", 1)
    _until(lambda: bench.recorder.totals.failed == 1)
    monkeypatch.undo()
    bench.clock.advance(11.0)
    bench.serve("there is room again", 1)
    bench.recorder.close()
    first, second = sorted(tmp_path.glob(FILE_PATTERN))
    assert len(read_recording(first).requests) == 3
    assert len(read_recording(second).requests) == 1
    assert bench.recorder.totals.written == 4


def test_a_folder_that_cannot_be_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        Bench(tmp_path / "file" / "traces").recorder.start()
    assert caught.value.field == "record.folder"


def test_closing_twice_or_unstarted_is_fine(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.recorder.close()
    bench.serve("before", 1)
    bench.recorder.start()
    bench.recorder.close()
    bench.recorder.close()
    bench.serve("after", 1)
    assert not list(tmp_path.glob(FILE_PATTERN))


def _until(condition: Any) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
