"""Sessions share what strangers do not; the head is what strangers share."""

from __future__ import annotations

from loadtest.workloads.sessions import find_sessions, shared_head


def test_requests_sharing_a_chain_beyond_the_head_are_one_session() -> None:
    # Blocks 0, 1: a system prompt with ten users. User 10 comes back twice, once on another branch.
    chains = [(0, 1, 10 + user) for user in range(10)] + [(0, 1, 10, 90), (0, 1, 10, 91)]
    head = shared_head(chains)
    assert head == {0, 1}
    assert find_sessions(chains, head) == [*range(10), 0, 0]


def test_a_conversation_with_a_few_branches_is_no_head() -> None:
    chains = [(5, 6, branch) for branch in range(10, 14)] * 5
    assert shared_head(chains) == frozenset()
    assert set(find_sessions(chains, frozenset())) == {0}


def test_several_system_prompts_are_all_heads() -> None:
    chains = [(prompt, 100 + prompt, 1000 * prompt + user) for prompt in (1, 2, 3) for user in range(20)]
    assert shared_head(chains) == {1, 2, 3, 101, 102, 103}


def test_what_is_only_head_is_a_session_of_its_own() -> None:
    assert find_sessions([(0,), (0,), (0, 1), (0, 1)], frozenset({0})) == [0, 1, 2, 2]
