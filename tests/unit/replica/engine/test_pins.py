"""Prefixes an engine holds: computed, held, told, given back; and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache.engine_report import MAX_PINS, decode_report, encode_report
from cache.errors import DeadlineExceeded, PinsFull
from cache.messages import FinishReason
from cache.types import PinId, RequestId
from replica.config import SimConfig
from replica.engine.engine_core import EngineCore, Progress
from replica.errors import ForwardFailed, InvalidRequest, RequestRefused
from tests.fakes.engine import BLOCK_SIZE, VirtualClock, make_pin, make_request, pinned, sim_core

PREFIX = list(range(5 * BLOCK_SIZE))  # five blocks


def a_core(clock: VirtualClock | None = None, **settings: object) -> EngineCore:
    """A pool of 64 blocks, 32 of which may be pinned."""
    return sim_core(64, clock=clock, **{"max_model_len": 100, **settings})  # type: ignore[arg-type]


def run(core: EngineCore) -> list[Progress]:
    ended = []
    while core.has_work:
        ended += [progress for progress in core.step() if progress.is_last]
    return ended


def pin(core: EngineCore, name: str = "p", prefix: list[int] = PREFIX, **options: float) -> Progress:
    core.submit(make_pin(name, prefix, **options))  # type: ignore[arg-type]
    (progress,) = run(core)
    return progress


def test_it_ends_when_its_prompt_is_computed_without_a_token() -> None:
    core = a_core(max_batched_tokens=8)
    progress = pin(core)
    assert progress.error is None
    assert progress.token_id is None
    assert progress.request.finish_reason is FinishReason.LENGTH
    assert progress.request.cached_tokens == 0
    (held,) = core.pins.held()
    assert (held.pin_id, held.num_blocks, held.owner) == ("p", 5, "somebody")
    assert core.stats().output_tokens == 0


def test_the_next_request_finds_all_of_it() -> None:
    core = a_core()
    pin(core)
    assert core.complete([make_request("r", [*PREFIX, 1])])[0].cached_tokens == len(PREFIX)


def test_nothing_is_computed_for_what_is_cached() -> None:
    core = a_core()
    pin(core)
    steps = core.stats().num_steps
    again = pin(core, "q")
    assert again.request.cached_tokens == len(PREFIX)
    assert core.stats().num_steps == steps
    assert core.stats().cache.pinned == 5
    assert len(core.pins.held()) == 2


def test_it_is_held_under_pressure_and_given_back_in_time() -> None:
    clock = VirtualClock()
    core = a_core(clock)
    pin(core, seconds=50.0)
    for index in range(6):  # fifteen blocks each: the pool is written over
        core.complete([make_request(f"r{index}", [100 + index] * 50, max_tokens=10)])
    assert core.complete([make_request("probe", [*PREFIX, 1])])[0].cached_tokens == len(PREFIX)
    clock.sleep(50.0)
    core.pins.expire()
    assert core.stats().cache.used == 0
    assert core.pins.held() == ()


def test_release_frees_it_once() -> None:
    core = a_core()
    pin(core)
    version = core.pins.version
    assert core.pins.release(PinId("p"))
    assert not core.pins.release(PinId("p"))
    assert core.pins.version == version + 1
    assert core.stats().cache.free == 64


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    core = a_core(max_model_len=64 * BLOCK_SIZE - 7 * BLOCK_SIZE)
    pin(core)
    with pytest.raises(PinsFull) as caught:
        core.submit(make_pin("q", [9] * 3 * BLOCK_SIZE))
    assert (caught.value.needed, caught.value.left) == (3, 2)
    assert not core.has_work
    assert pin(core, "longer", [*PREFIX, *[9] * 2 * BLOCK_SIZE]).error is None  # five blocks are shared


def test_room_is_kept_for_what_is_being_computed() -> None:
    core = a_core(max_model_len=64 * BLOCK_SIZE - 7 * BLOCK_SIZE)
    core.submit(make_pin("p", PREFIX))
    with pytest.raises(PinsFull):
        core.submit(make_pin("q", [9] * 3 * BLOCK_SIZE))
    core.cancel(RequestId("p"))
    assert pin(core, "q", [9] * 7 * BLOCK_SIZE).error is None


def test_a_deadline_a_failure_and_a_cancellation_leave_nothing() -> None:
    clock = VirtualClock()
    core = a_core(clock, sim=SimConfig(raise_every_steps=1))
    core.submit(make_pin("late", PREFIX, deadline_s=0.5))
    clock.sleep(1.0)
    assert isinstance(run(core)[0].error, DeadlineExceeded)
    assert isinstance(pin(core, "failed").error, ForwardFailed)
    core.submit(make_pin("cancelled", PREFIX))
    core.cancel(RequestId("cancelled"))
    assert core.pins.held() == ()
    assert core.stats().cache.free == 64
    report = core.report(epoch=1, number=1)
    assert (report.pinned_blocks, report.pins) == (0, ())


def test_it_is_told_in_reports() -> None:
    core = a_core()
    pin(core)
    report = core.report(epoch=1, number=1)
    assert (report.pinned_blocks, report.max_pinned_blocks) == (5, 32)
    assert [held.pin_id for held in report.pins] == ["p"]


def test_a_name_is_taken_once() -> None:
    core = a_core()
    pin(core)
    with pytest.raises(RequestRefused, match="held here already"):
        core.submit(replace(make_pin("p", PREFIX), request_id=RequestId("other")))


def test_no_more_than_a_report_can_tell() -> None:
    core = sim_core(1024, max_model_len=100)
    for index in range(MAX_PINS):
        pin(core, f"p{index}", [index] * BLOCK_SIZE)
    with pytest.raises(PinsFull):
        core.submit(make_pin("q", PREFIX))


def test_those_asked_for_at_once_are_no_more_than_a_report_can_tell() -> None:
    """Routers cannot read one that tells more, and so nothing of the replica."""
    core, num_refused = sim_core(1024, max_model_len=100, max_waiting=1000), 0
    for index in range(MAX_PINS + 3):
        try:
            core.submit(make_pin(f"p{index}", [index] * BLOCK_SIZE))
        except PinsFull:
            num_refused += 1
    run(core)
    report = core.report(epoch=1, number=1)
    assert (num_refused, len(report.pins)) == (3, MAX_PINS)
    assert decode_report(encode_report(report)) == report


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_lease_without_an_end_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidRequest):
        a_core().submit(make_pin("p", PREFIX, seconds=seconds))


def test_less_than_a_block_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        a_core().submit(make_pin("p", PREFIX[: BLOCK_SIZE - 1]))


def test_without_prefix_caching_nothing_is_held() -> None:
    with pytest.raises(RequestRefused, match="prefix_caching"):
        a_core(prefix_caching=False).submit(make_pin("p", PREFIX))


def test_a_share_of_nothing() -> None:
    with pytest.raises(PinsFull) as caught:
        a_core(max_pinned_fraction=0.0).submit(make_pin("p", PREFIX))
    assert (caught.value.needed, caught.value.left) == (5, 0)


def test_what_is_held_is_no_load() -> None:
    """Routers are told the same as of an engine whose pool is smaller by it."""
    loads: list[list[tuple[int, int, int, int]]] = []
    for core in (pinned(sim_core(63, max_model_len=100), 30), sim_core(33, max_model_len=100)):
        loads.append([])
        for number in range(3):
            core.submit(make_request(str(number), [200 + number] * 12, max_tokens=40))
            core.step()
            load = core.load()
            told = (load.free_blocks, load.growth_blocks, load.total_blocks, load.context_tokens)
            loads[-1].append(told)
        assert load.num_running == 2
        assert load.num_waiting == 1
    assert loads[0] == loads[1]


def test_who_runs_on_a_held_prefix_takes_what_is_its_own() -> None:
    core = a_core()
    pin(core)
    core.submit(make_request("r", [*PREFIX, 1], max_tokens=8))
    core.step()
    load = core.load()
    assert (load.total_blocks, load.total_blocks - load.free_blocks) == (64 - 5, 1)
