"""What a recording says: readable by the simulation, and without text."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from cache.types import RequestId
from loadtest.workloads.recording import read_recording
from router.errors import AllBusy, NoReplica
from router.placement.decision import RouteQuery
from tests.fakes.recorder import PROMPT, SIZE, Bench, lines
from tests.fakes.router import chain, hint_chain, info, replica_id


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
