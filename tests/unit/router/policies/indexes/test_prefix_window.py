"""What prefixes of the last minutes cost, and whom. Prefill takes 1 s per token here."""

from __future__ import annotations

import pytest

from cache.types import ReplicaId
from router.policies.indexes.prefix_window import PrefixWindow

A, B = ReplicaId("a"), ReplicaId("b")


@pytest.fixture
def window() -> PrefixWindow:
    made = PrefixWindow(window_s=180.0, prefill_s=lambda num_tokens, context_tokens: float(num_tokens))
    made.add_owner(A, 10_000)
    made.add_owner(B, 10_000)
    return made


def send(window: PrefixWindow, blocks: tuple[int, ...], owner: ReplicaId, now: float) -> None:
    """A prompt of 10-token blocks, counted where it ends."""
    leaf = window.insert(blocks, 10, owner)
    window.count(leaf, leaf.end_chars, leaf.chars_before, now)


def test_a_cold_prompt_costs_its_replica_all_of_it(window: PrefixWindow) -> None:
    send(window, (1, 2, 3), A, 0.0)
    assert window.owner_use(A).work_s == 30.0
    assert window.owner_use(B).work_s == 0.0
    assert (window.owner_use(A).num_requests, window.owner_use(A).num_nodes) == (1, 1)


def test_the_miss_rate_is_that_of_its_requests(window: PrefixWindow) -> None:
    """The second ends at the new half of the prompt: 10 of its 20 tokens were known, so half a miss."""
    send(window, (1,), A, 0.0)
    send(window, (1, 2), A, 0.0)
    # node (1): one request, all missed: 10; node (2): one request, half missed, 10 tokens: 5
    assert window.owner_use(A).work_s == pytest.approx(15.0)


def test_owners_of_a_node_share_its_work(window: PrefixWindow) -> None:
    send(window, (1, 2), A, 0.0)
    send(window, (1, 2), B, 0.0)
    # one node of 20 tokens, two requests, both counted as missed: 40, by two
    assert window.owner_use(A).work_s == pytest.approx(20.0)
    assert window.owner_use(B).work_s == pytest.approx(20.0)
    window.trim(B, 0)
    assert window.owner_use(A).work_s == pytest.approx(40.0)
    assert window.owner_use(B).work_s == 0.0


def test_a_split_leaves_the_count_with_the_longer_prompt(window: PrefixWindow) -> None:
    send(window, (1, 2, 3), A, 0.0)
    send(window, (1, 9), B, 0.0)
    # (2, 3) of A: 20 tokens all missed; (9) of B: 10 tokens, half of its 20 missed; (1): not counted
    assert window.owner_use(A).work_s == pytest.approx(20.0)
    assert window.owner_use(B).work_s == pytest.approx(5.0)


def test_requests_leave_the_window(window: PrefixWindow) -> None:
    send(window, (1, 2), A, 0.0)
    send(window, (1, 2), A, 100.0)
    window.expire(180.1)
    assert window.owner_use(A).work_s == pytest.approx(20.0)
    window.expire(280.1)
    assert window.owner_use(A).work_s == 0.0
    assert window.uses() == []
    assert window.match((1, 2)).length == 2  # what was sent there is still known


def test_use_can_move_to_the_new_front_of_a_node(window: PrefixWindow) -> None:
    send(window, (1, 2, 3), A, 0.0)
    lower = window.match((1, 2, 3)).node
    window.insert((1, 2), 10, A)
    window.move_use(lower, window.match((1, 2)).node)
    assert window.owner_use(A).work_s == pytest.approx(20.0)
    assert window.recompute_s(lower) == 0.0


def test_an_owner_that_left_bears_nothing_when_it_returns(window: PrefixWindow) -> None:
    send(window, (1, 2), A, 0.0)
    window.remove_owner(A)
    window.add_owner(A, 10_000)
    assert window.owner_use(A).work_s == 0.0
    window.expire(1000.0)
    assert window.owner_use(A).work_s == 0.0


def test_what_left_the_window_counts_neither_as_asked_nor_as_cached(window: PrefixWindow) -> None:
    node = window.insert((1, 2), 10, A)
    window.count(node, 20, 20, 0.0)
    window.count(node, 20, 0, 100.0)
    assert window.owner_use(A).work_s == pytest.approx(20.0)  # two requests, half missed, 20 tokens
    window.expire(180.1)
    assert window.owner_use(A).work_s == pytest.approx(20.0)  # one request, all of it missed
