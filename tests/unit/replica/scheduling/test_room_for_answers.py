"""Who is let in beside others: its prompt fits, and so do the answers (docs/design/017)."""

from __future__ import annotations

import pytest

from tests.fakes.engine import BLOCK_SIZE, expect_short_answers, make_request, run, sim_core


def test_nobody_is_let_in_for_whose_answer_there_is_no_room() -> None:
    """Three of them have prompts that fit, and answers of which one at a time does: nobody is thrown out."""
    requests = [make_request(f"r{i}", range(10 * i, 10 * i + 10), max_tokens=16) for i in range(3)]
    core = sim_core(num_blocks=10)
    for request in requests:
        core.submit(request)
    core.step()
    assert (core.load().num_running, core.load().num_waiting) == (1, 2)
    run(core)
    assert core.stats().preemptions == 0


def test_answers_are_expected_to_be_as_long_as_those_before() -> None:
    """Whoever says nothing of its answer's length does not get the pool for itself."""
    core = sim_core(num_blocks=14)
    expect_short_answers(core)
    for i in range(3):
        core.submit(make_request(f"r{i}", range(10 * i, 10 * i + 10), max_tokens=40))
    core.step()
    assert core.load().num_running == 3


@pytest.mark.parametrize(("num_blocks", "is_let_in"), [(49, True), (50, False)])
def test_a_part_of_the_blocks_stays_free_beside_others(num_blocks: int, is_let_in: bool) -> None:
    """Two of 64, since answers are not quite as expected. 54 are free, and until the newcomer's answer ends
    the two of them take three beside its prompt's."""
    core = sim_core(64)
    core.submit(make_request("runs", range(40), max_tokens=40))
    core.step()
    core.submit(make_request("comes", range(100, 100 + num_blocks * BLOCK_SIZE), max_tokens=4))
    core.step()
    assert core.load().num_running == 1 + is_let_in


def test_who_comes_alone_may_have_all_blocks() -> None:
    core = sim_core(64)
    core.submit(make_request("alone", range(63 * BLOCK_SIZE), max_tokens=4))
    core.step()
    assert core.load().num_running == 1


def test_who_waits_hears_that_free_blocks_are_spoken_for() -> None:
    """Routers are told: of the seven free blocks the running answer takes four, whoever waits needs six."""
    core = sim_core(num_blocks=10)
    core.submit(make_request("runs", range(10), max_tokens=16))
    core.step()
    assert core.load().growth_blocks == 0  # more than half are free
    core.submit(make_request("waits", range(50, 60), max_tokens=16))
    core.step()
    load = core.load()
    assert (load.num_waiting, load.free_blocks, load.growth_blocks) == (1, 7, 4)


def test_who_shares_blocks_leaves_fewer_to_be_given_back() -> None:
    """The longest answer counts on five blocks of "ends first"; once the twin reads four, on one of each."""
    core = sim_core(num_blocks=16)
    core.submit(make_request("ends first", range(18), max_tokens=4))
    core.submit(make_request("goes on", range(50, 60), max_tokens=30))
    core.step()
    assert core.load().growth_blocks == 2  # each one, as good as seven of which five come back
    core.submit(make_request("twin", range(18), max_tokens=4))
    core.step()
    assert core.load().num_running == 3
    assert core.load().growth_blocks == 5  # of the seven now two come back
