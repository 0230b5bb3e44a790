"""Traces are read strictly: what cannot be true is named by file, line and field."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.placement.report import of_recording
from loadtest.placement.stretch import busiest
from loadtest.placement.suites import EXCERPT
from loadtest.simulation.machine import H100_8B
from loadtest.workloads.errors import TraceError
from loadtest.workloads.mooncake import read_mooncake
from loadtest.workloads.request import by_prompt
from loadtest.workloads.trace_source import TraceSource
from loadtest.workloads.traces import read_trace

GOOD: dict[str, Any] = {"timestamp": 3000, "input_length": 1025, "output_length": 7, "hash_ids": [0, 4, 9]}
HEADER = {"format": "warmpath-trace", "version": 1, "model": "tiny"}
RECORD: dict[str, Any] = {"t": 5.5, "input": 35, "output": 3, "blocks": ["a1", "b2"], "block_size": 16}
SEVERAL: dict[str, Any] = {
    **{name: value for name, value in RECORD.items() if name != "output"},
    "n": 2,
    "outputs": [7, 4],
}
REFUSED = {**{name: value for name, value in RECORD.items() if name != "output"}, "refused": True}
REFUSED_SEVERAL = {**REFUSED, "n": 2}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def changed(row: dict[str, Any], **fields: object) -> dict[str, Any]:
    return {**row, **fields}


class TestMooncake:
    def test_a_worked_example(self, tmp_path: Path) -> None:
        later = changed(GOOD, timestamp=4500, input_length=512, hash_ids=[0])
        trace = read_trace(write(tmp_path / "mine.jsonl", GOOD, later))
        assert trace.name == "mine"
        assert trace.block_tokens == 512
        first, second = trace.requests
        assert (first.arrival_s, first.input_tokens, first.output_tokens) == (0.0, 1025, 7)
        assert first.block_ids == (0, 4, 9)
        assert second.arrival_s == 1.5

    @pytest.mark.parametrize(
        ("bad", "field"),
        [
            ({k: v for k, v in GOOD.items() if k != "output_length"}, "output_length"),
            (changed(GOOD, surprise=1), "surprise"),
            (changed(GOOD, timestamp="now"), "timestamp"),
            (changed(GOOD, timestamp=True), "timestamp"),
            (changed(GOOD, timestamp=-1), "timestamp"),
            (changed(GOOD, timestamp=2999), "timestamp"),
            (changed(GOOD, input_length=0), "input_length"),
            (changed(GOOD, input_length=1025.0), "input_length"),
            (changed(GOOD, input_length=10**9), "input_length"),
            (changed(GOOD, output_length=None), "output_length"),
            (changed(GOOD, hash_ids=7), "hash_ids"),
            (changed(GOOD, hash_ids=[0, 4]), "hash_ids"),
            (changed(GOOD, hash_ids=[0, 4, -9]), "hash_ids"),
            (changed(GOOD, hash_ids=[0, 4, "9"]), "hash_ids"),
            (changed(GOOD, hash_ids=[0, 4, 4]), "hash_ids"),
            (changed(GOOD, hash_ids=[0, 9, 4]), "hash_ids"),  # 9 followed 4 on the line above
        ],
    )
    def test_names_file_line_and_field(self, tmp_path: Path, bad: dict[str, Any], field: str) -> None:
        path = write(tmp_path / "bad.jsonl", GOOD, bad, GOOD)
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        assert (caught.value.line, caught.value.field) == (2, field)
        assert f"{path}, line 2, field {field!r}" in str(caught.value)

    @pytest.mark.parametrize("text", ["", "{", "[1]", '{"timestamp": NaN}', "\x00", '"a"'])
    def test_names_the_line_that_is_no_request(self, tmp_path: Path, text: str) -> None:
        path = write(tmp_path / "bad.jsonl", GOOD, text)
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        assert caught.value.line == 2

    def test_a_line_without_an_end_is_told_to_be_one(self, tmp_path: Path) -> None:
        """A copy of a recording that is being written ends anywhere, and nobody knew what to do about it."""
        path = write(tmp_path / "copied.jsonl", GOOD, GOOD)
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(TraceError, match=r"line 2: is not JSON: .*leave it out"):
            read_trace(path)

    def test_refuses_nan_as_a_time(self, tmp_path: Path) -> None:
        path = write(tmp_path / "bad.jsonl", json.dumps(changed(GOOD, timestamp=float("nan"))))
        with pytest.raises(TraceError, match="timestamp"):
            read_trace(path)

    def test_an_empty_file_holds_no_requests(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="holds no requests"):
            read_trace(write(tmp_path / "empty.jsonl"))

    def test_weeks_without_a_request_are_told_by_the_line_after_them(self, tmp_path: Path) -> None:
        later = changed(GOOD, timestamp=3000 + 32 * 86_400_000)
        with pytest.raises(TraceError, match="32 days") as caught:
            read_trace(write(tmp_path / "bad.jsonl", GOOD, later))
        assert (caught.value.line, caught.value.field) == (2, "timestamp")
        assert len(read_trace(write(tmp_path / "late.jsonl", later)).requests) == 1

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match=r"none\.jsonl: cannot be read"):
            read_trace(tmp_path / "none.jsonl")

    def test_a_damaged_archive_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "cut.jsonl.gz"
        path.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 50)[:-20])
        with pytest.raises(TraceError, match="cannot be read"):
            read_trace(path)

    def test_the_excerpt_is_the_published_traces_head(self) -> None:
        trace = read_mooncake(EXCERPT)
        assert len(trace.requests) == 4_000
        assert trace.requests[0].block_ids == tuple(range(14))
        assert (EXCERPT.parent / "LICENSE").read_text().lstrip().startswith("Apache License")
        assert len({request.session for request in trace.requests}) > 2_000
        assert all(request.block_ids[0] == 0 for request in trace.requests)  # one system prompt for all


class TestRecording:
    def test_a_worked_example(self, tmp_path: Path) -> None:
        late = changed(RECORD, t=5.0, input=16, blocks=["a1"], output=0, session="s")
        twin = changed(RECORD, t=6.0, session="s")
        trace = read_trace(write(tmp_path / "r.jsonl", HEADER, RECORD, late, HEADER, twin))
        first, second, third = trace.requests  # in order of time, though written when they ended
        assert [r.arrival_s for r in trace.requests] == [0.0, 0.5, 1.0]
        assert first.output_tokens == 1
        assert second.block_ids[:2] == third.block_ids[:2]
        assert second.block_ids[0] == first.block_ids[0]
        assert second.block_ids[2] != third.block_ids[2]  # partial blocks are nobody else's
        assert first.session == third.session != second.session
        assert trace.block_tokens == 16

    def test_who_was_refused_would_have_had_an_answer_like_the_others(self, tmp_path: Path) -> None:
        newer = {**HEADER, "version": 2}
        short, long = changed(RECORD, output=10), changed(RECORD, output=21, t=8.5)
        trace = read_trace(write(tmp_path / "r.jsonl", newer, short, REFUSED, HEADER, long))
        assert sorted(request.output_tokens for request in trace.requests) == [10, 16, 21]
        assert [request.output_tokens for request in trace.requests if request.was_refused] == [16]
        assert trace.num_refused == 1
        window = TraceSource(trace).window(1.0, 6, seed=0)
        assert 1 <= window.num_refused < 6

    def test_nobody_knows_how_long_answers_are_where_all_were_refused(self, tmp_path: Path) -> None:
        [request] = read_trace(write(tmp_path / "r.jsonl", {**HEADER, "version": 2}, REFUSED)).requests
        assert (request.output_tokens, request.was_refused) == (1, True)

    def test_each_answer_is_a_request_of_its_own(self, tmp_path: Path) -> None:
        longer = changed(RECORD, t=9.5, input=48, blocks=["a1", "b2", "c3"])
        path = write(tmp_path / "r.jsonl", HEADER, changed(SEVERAL, session="s"), REFUSED_SEVERAL, longer)
        trace = read_trace(path)
        assert [request.output_tokens for request in trace.requests] == [7, 4, 5, 5, 3]
        assert [request.branch for request in trace.requests] == [0, 1, 0, 1, 0]
        assert [request.was_refused for request in trace.requests] == [False, False, True, True, False]
        one, other = trace.requests[:2]
        assert (one.arrival_s, one.session, one.block_ids) == (
            other.arrival_s,
            other.session,
            other.block_ids,
        )
        assert trace.num_further_answers == 2
        assert "2 of 5 requests are further answers" in of_recording(trace)
        assert [len(answers) for answers in by_prompt(trace.requests)] == [2, 2, 1]

    @pytest.mark.parametrize(
        ("bad", "field"),
        [
            (changed(SEVERAL, output=11), "output"),
            (changed(RECORD, n=1), "outputs"),
            (changed(REFUSED, n=1), "n"),
            (changed(SEVERAL, n=3), "outputs"),
            (changed(SEVERAL, outputs=11), "outputs"),
            (changed(SEVERAL, outputs=[7, "4"]), "outputs"),
            (changed(SEVERAL, outputs=[7, -1]), "outputs"),
            ({k: v for k, v in SEVERAL.items() if k != "n"}, "n"),
            ({k: v for k, v in RECORD.items() if k != "t"}, "t"),
            ({k: v for k, v in RECORD.items() if k != "output"}, "output"),
            (changed(REFUSED, output=3), "output"),
            (changed(REFUSED, refused=False), "refused"),
            (changed(REFUSED, refused=1), "refused"),
            (changed(RECORD, text="secret"), "text"),
            (changed(RECORD, t=-0.1), "t"),
            (changed(RECORD, input=0), "input"),
            (changed(RECORD, output=-1), "output"),
            (changed(RECORD, blocks=["a1"]), "blocks"),
            (changed(RECORD, blocks=["a1", "xyz"]), "blocks"),
            (changed(RECORD, blocks=["b2", "a1"]), "blocks"),
            (changed(RECORD, blocks=["a1", 7]), "blocks"),
            (changed(RECORD, block_size=32, blocks=["a1"]), "block_size"),
            (changed(RECORD, block_size=0), "block_size"),
            (changed(RECORD, session=3), "session"),
        ],
    )
    def test_names_file_line_and_field(self, tmp_path: Path, bad: dict[str, Any], field: str) -> None:
        path = write(tmp_path / "bad.jsonl", HEADER, RECORD, bad)
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        assert (caught.value.line, caught.value.field) == (3, field)

    def test_recordings_put_together_keep_their_distance_in_time(self, tmp_path: Path) -> None:
        later = {**HEADER, "started_at": 1_000_060.0}
        path = write(tmp_path / "r.jsonl", {**HEADER, "started_at": 1_000_000.0}, RECORD, later, RECORD)
        assert [r.arrival_s for r in read_trace(path).requests] == [0.0, 60.0]

    @pytest.mark.parametrize(("first", "second"), [({}, {"started_at": 1.7e9}), ({"started_at": 1.7e9}, {})])
    def test_parts_with_and_without_a_date_do_not_go_together(
        self, first: dict[str, float], second: dict[str, float], tmp_path: Path
    ) -> None:
        """They were taken to be half a century apart."""
        path = write(tmp_path / "r.jsonl", {**HEADER, **first}, RECORD, {**HEADER, **second}, RECORD)
        with pytest.raises(TraceError, match="further up") as caught:
            read_trace(path)
        assert (caught.value.line, caught.value.field) == (3, "started_at")

    def test_a_part_that_is_there_twice_is_refused(self, tmp_path: Path) -> None:
        """`cat traffic-*.jsonl all.jsonl`: every request came twice, and found its own prompt cached."""
        first = {**HEADER, "recording": "3fa9c1d2", "part": 1}
        others = [{**first, "part": 2}, {**first, "recording": "b01d5aa2"}]
        parts = [line for header in (first, *others) for line in (header, RECORD)]
        assert len(read_trace(write(tmp_path / "r.jsonl", *parts)).requests) == 3
        with pytest.raises(TraceError, match="'3fa9c1d2' is there already, from line 1 on") as caught:
            read_trace(write(tmp_path / "r.jsonl", *parts, first, RECORD))
        assert (caught.value.line, caught.value.field) == (7, "part")

    def test_weeks_without_a_request_are_told_by_the_line_after_them(self, tmp_path: Path) -> None:
        headers = [{**HEADER, "started_at": 1.7e9 + days * 86_400} for days in (0, 40, 20)]
        parts = [part for header in headers for part in (header, RECORD)]
        assert len(read_trace(write(tmp_path / "r.jsonl", *parts)).requests) == 3
        with pytest.raises(TraceError, match="40 days after the request before it, more than 31") as caught:
            read_trace(write(tmp_path / "r.jsonl", *parts[:4]))
        assert (caught.value.line, caught.value.field) == (4, "t")

    def test_how_many_keys_ids_were_made_with_is_kept(self, tmp_path: Path) -> None:
        """What prompts of two keys share is not known: a Router without one in its settings draws it."""
        ours, theirs = {**HEADER, "key": "b01d5aa27c90e344"}, {**HEADER, "key": "5e5e5e5e5e5e5e5e"}
        later = changed(RECORD, t=9.5)
        one = read_trace(write(tmp_path / "one.jsonl", ours, RECORD, {**ours, "part": 2}, later))
        two = read_trace(write(tmp_path / "two.jsonl", ours, RECORD, theirs, later))
        older = read_trace(write(tmp_path / "older.jsonl", HEADER, RECORD, HEADER, later))
        assert [one.num_keys, two.num_keys, older.num_keys] == [1, 2, 1]
        assert two.window(0.0, 1).num_keys == 2
        assert busiest(two, 1, cache_tokens=1_000, machine=H100_8B).cut(two).num_keys == 2
        assert "Block ids are of 2 keys" in of_recording(two)
        assert of_recording(one) == of_recording(older) == ""

    @pytest.mark.parametrize(
        ("header", "field"),
        [
            ({"format": "other", "version": 1}, "format"),
            ({"format": "warmpath-trace"}, "version"),
            ({"format": "warmpath-trace", "version": 3}, "version"),
        ],
    )
    def test_refuses_other_headers(self, tmp_path: Path, header: dict[str, Any], field: str) -> None:
        with pytest.raises(TraceError) as caught:
            read_trace(write(tmp_path / "bad.jsonl", header, RECORD))
        assert (caught.value.line, caught.value.field) == (1, field)

    def test_a_header_alone_holds_no_requests(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="holds no requests"):
            read_trace(write(tmp_path / "r.jsonl", HEADER))
