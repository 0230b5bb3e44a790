"""A recording: readable by the simulation, without text, bounded, and never in a request's way."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cache.errors import ConfigError
from cache.types import RequestId
from loadtest.workloads.recording import read_recording
from router.config import RecordConfig
from router.errors import AllBusy, NoReplica
from router.insight.recording import FILE_PATTERN, TrafficRecorder
from router.openai_api.prompt_text import PlainText
from router.placement.decision import RouteQuery
from router.placement.routing import Routing
from tests.fakes.router import FakeClock, chain, config, hint_chain, info, load, replica_id

SIZE = 16


PROMPT = PlainText("do not record me", "nor me")


class Bench:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.clock = FakeClock()
        self.recorder = TrafficRecorder(
            RecordConfig(folder=str(folder), **settings),
            block_size=SIZE,
            model_name="paper",
            clock=self.clock,
            wall_clock=lambda: 1_750_000_000.0,
        )
        self.routing = Routing(config(), clock=self.clock)
        self.routing.watch(self.recorder)
        self.routing.update_replicas({replica_id(0): info()})
        self.routing.on_load(replica_id(0), load())

    def serve(
        self,
        name: str,
        num_blocks: int,
        *,
        of: str = "",
        output: int = 3,
        outputs: Sequence[int] = (),
        **changes: Any,
    ) -> None:
        """One request from decision to end; `of`: whose prompt it repeats."""
        query = RouteQuery(RequestId(name), chain(of or name, num_blocks), num_blocks * SIZE + 5, **changes)
        self.routing.choose(query)
        self.routing.first_token(query.request_id, replica_id(0), 0)
        self.routing.finish(query.request_id, answers=outputs or (output,))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(folder.glob(FILE_PATTERN))
        for line in path.read_text().splitlines()
    ]


def test_the_simulation_reads_what_was_recorded(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.recorder.start()
    bench.clock.advance(1.5)
    bench.serve("one", 3, output=7)
    bench.clock.advance(2.0)
    bench.serve("two", 5, of="one")
    bench.recorder.close()
    workload = read_recording(bench.recorder.path)
    first, second = workload.requests
    assert workload.block_tokens == SIZE
    assert (first.arrival_s, first.input_tokens, first.output_tokens) == (0.0, 53, 7)
    assert second.arrival_s == pytest.approx(2.0)
    assert first.block_ids[:3] == second.block_ids[:3]
    assert (len(first.block_ids), len(second.block_ids)) == (4, 6)
    assert first.session == second.session
    assert bench.recorder.totals.written == 2


def test_several_answers_are_told_one_by_one(tmp_path: Path) -> None:
    """They were one answer as long as all of them: sixteen of 200 tokens made one of 3,200."""
    bench = Bench(tmp_path)
    bench.recorder.start()
    bench.serve("several", 2, outputs=(64, 0, 21), n=3)
    bench.routing.update_replicas({})
    with pytest.raises(NoReplica):
        bench.routing.choose(RouteQuery(RequestId("late"), chain("late", 2), 2 * SIZE, n=2))
    bench.recorder.close()
    _, served, refused = lines(tmp_path)
    assert set(served) == {"t", "input", "n", "outputs", "blocks", "block_size"}
    assert (served["n"], served["outputs"]) == (3, [64, 0, 21])
    assert (refused["n"], refused["refused"]) == (2, True)
    requests = read_recording(bench.recorder.path).requests
    assert [request.output_tokens for request in requests] == [64, 1, 21, 29, 29]
    assert [request.branch for request in requests] == [0, 1, 2, 0, 1]
    assert len({(r.arrival_s, r.session, r.block_ids) for r in requests[:3]}) == 1


def test_the_header_says_what_it_is_and_the_key_is_nowhere(tmp_path: Path) -> None:
    bench = Bench(tmp_path, key="a secret of many letters")
    bench.recorder.start()
    bench.serve("one", 2, prompt=PROMPT, session="customer 7", token_ids=array("i", range(37)))
    bench.recorder.close()
    header, row = lines(tmp_path)
    assert (header["format"], header["version"], header["block_size"]) == ("warmpath-trace", 2, SIZE)
    assert set(row) == {"t", "input", "output", "blocks", "block_size", "session"}
    content = bench.recorder.path.read_text()
    for secret in ("a secret", "customer 7", "nor me", "do not record", "one"):
        assert secret not in content
    for hint in hint_chain("one", 2):
        assert f"{hint:x}" not in content
        assert hint.to_bytes(8, "little").hex() not in content


def test_sessions_of_two_salts_are_two(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.recorder.start()
    for number, salt in enumerate(("", "ours", "theirs", "ours")):
        bench.serve(str(number), 1, session="s", cache_salt=salt)
    bench.recorder.close()
    names = [row["session"] for row in lines(tmp_path)[1:]]
    assert names[1] == names[3]
    assert len(set(names)) == 3


def test_ids_mean_something_only_under_one_key(tmp_path: Path) -> None:
    found = []
    for number, key in enumerate([None, None, "k" * 20, "k" * 20]):
        folder = tmp_path / str(number)
        bench = Bench(folder, key=key)
        bench.recorder.start()
        bench.serve("same prompt", 2)
        bench.recorder.close()
        found.append(lines(folder)[1]["blocks"])
    assert found[0] != found[1]
    assert found[2] == found[3]


def test_the_header_names_the_key_and_nothing_of_it(tmp_path: Path) -> None:
    """So that readers know whose ids may be compared."""

    def named(folder: str, **settings: Any) -> str:
        bench = Bench(tmp_path / folder, **settings)
        bench.recorder.start()
        bench.serve("one", 1)
        bench.recorder.close()
        name: str = lines(tmp_path / folder)[0]["key"]
        return name

    ours, theirs = "a secret of many letters", "another one of many letters"
    assert named("a", key=ours) == named("b", key=ours) != named("c", key=theirs)
    (tmp_path / "key").write_text(f"{ours}\n")
    assert named("d", key_file=str(tmp_path / "key")) == named("a", key=ours)
    assert named("d") != named("e")


def test_coarser_blocks_are_every_nth(tmp_path: Path) -> None:
    bench = Bench(tmp_path, block_tokens=4 * SIZE)
    bench.recorder.start()
    bench.serve("one", 11)
    bench.recorder.close()
    _, row = lines(tmp_path)
    assert (len(row["blocks"]), row["block_size"]) == (2, 64)
    [request] = read_recording(bench.recorder.path).requests
    assert len(request.block_ids) == 3


def test_a_held_request_is_recorded_when_it_came(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.recorder.start()
    asked_at = bench.clock.now + 1.0
    bench.clock.advance(4.0)
    bench.serve("held", 1, asked_at=asked_at)
    bench.recorder.close()
    assert lines(tmp_path)[1]["t"] == 1.0


def test_a_retry_is_one_request(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.recorder.start()
    name = RequestId("r")
    bench.routing.choose(RouteQuery(name, chain("r", 2), 40))
    bench.clock.advance(1.0)
    bench.routing.choose(RouteQuery(name, chain("r", 3), 50))  # continued: its output so far goes along
    bench.routing.finish(name, answers=(12,))
    bench.routing.finish(RequestId("never decided"))
    bench.recorder.close()
    _, row = lines(tmp_path)
    assert (row["t"], row["input"], row["output"], len(row["blocks"])) == (0.0, 40, 12, 2)


def test_who_was_refused_came_all_the_same(tmp_path: Path) -> None:
    """A plan made from those that were served is a plan for them, however many were sent away."""
    bench = Bench(tmp_path)
    bench.routing.update_replicas({replica_id(1): info(max_running=1, max_waiting=1)})
    bench.recorder.start()
    names = [RequestId(str(number)) for number in range(20)]
    num_refused = 0
    for name in names:
        try:
            bench.routing.choose(RouteQuery(name, chain("shared", 2), 2 * SIZE + 1, session="s"))
        except AllBusy:
            num_refused += 1
    bench.clock.advance(1.0)
    for name in names:
        bench.routing.finish(name, answers=(6,))
    bench.routing.update_replicas({})
    came_at = bench.clock.now - 0.5
    with pytest.raises(NoReplica):
        bench.routing.choose(RouteQuery(RequestId("late"), chain("late", 2), 2 * SIZE, asked_at=came_at))
    bench.recorder.close()
    assert bench.recorder.totals.written == 21
    refused = [row for row in lines(tmp_path) if row.get("refused")]
    assert len(refused) == num_refused + 1 == 19
    assert set(refused[0]) == {"t", "input", "refused", "blocks", "block_size", "session"}
    assert (refused[-1]["t"], refused[-1]["input"], len(refused[-1]["blocks"])) == (0.5, 32, 2)
    requests = read_recording(bench.recorder.path).requests
    assert [request.output_tokens for request in requests] == [6] * 21
    assert sum(request.was_refused for request in requests) == 19


def test_prompts_that_are_scored_are_nobody_elses(tmp_path: Path) -> None:
    """Nothing is looked up for them, so they have no hashes; one made the whole recording unreadable."""
    bench = Bench(tmp_path, block_tokens=2 * SIZE)
    bench.recorder.start()
    for name in ("one", "two"):
        bench.routing.choose(RouteQuery(RequestId(name), (), 5 * SIZE))
        bench.routing.finish(RequestId(name), answers=(1,))
    bench.recorder.close()
    one, two = read_recording(bench.recorder.path).requests
    assert len(one.block_ids) == len(two.block_ids) == 3
    assert not set(one.block_ids) & set(two.block_ids)


def test_a_retry_that_is_refused_is_no_request_of_its_own(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.recorder.start()
    bench.routing.choose(RouteQuery(RequestId("r"), chain("r", 2), 40))
    only = frozenset({replica_id(0)})
    with pytest.raises(NoReplica):
        bench.routing.choose(RouteQuery(RequestId("r"), chain("r", 2), 40, excluded=only))
    bench.routing.finish(RequestId("r"), answers=(2,))
    bench.recorder.close()
    _, row = lines(tmp_path)
    assert row["output"] == 2


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
