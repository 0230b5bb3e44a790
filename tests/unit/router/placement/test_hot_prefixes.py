"""Which prefixes are worth another copy."""

from __future__ import annotations

import itertools

from router.placement.hot_prefixes import STRIDE_TOKENS, HotPrefixes
from tests.fakes.router import BLOCK_SIZE, hint_chain

STRIDE = STRIDE_TOKENS // BLOCK_SIZE
LENGTHS = itertools.count(1)  # no two prompts are twins


def test_only_the_shared_part_of_many_prompts_is_hot() -> None:
    hot, system = HotPrefixes(BLOCK_SIZE), hint_chain("system", 4 * STRIDE)
    for index in range(10):
        hot.record([*system, *hint_chain(f"user{index}", 4 * STRIDE)], next(LENGTHS), now=float(index))
    prompt = [*system, *hint_chain("user3", 4 * STRIDE)]
    assert hot.num_hot_blocks(prompt, min_uses=10) == 4 * STRIDE
    assert hot.num_hot_blocks(prompt, min_uses=11) == 0
    assert hot.num_hot_blocks(prompt, min_uses=1) == 8 * STRIDE


def test_uses_are_forgotten_after_two_windows() -> None:
    hot, prompt = HotPrefixes(BLOCK_SIZE, window_s=60.0), hint_chain("p", STRIDE)
    hot.record(prompt, next(LENGTHS), now=0.0)
    hot.record(hint_chain("other", STRIDE), next(LENGTHS), now=61.0)
    assert hot.num_hot_blocks(prompt, min_uses=1) == STRIDE
    hot.record(hint_chain("other", STRIDE), next(LENGTHS), now=122.0)
    assert hot.num_hot_blocks(prompt, min_uses=1) == 0


def test_a_long_silence_forgets_at_once() -> None:
    hot, prompt = HotPrefixes(BLOCK_SIZE, window_s=60.0), hint_chain("p", STRIDE)
    hot.record(prompt, next(LENGTHS), now=0.0)
    hot.record(hint_chain("other", STRIDE), next(LENGTHS), now=500.0)
    assert hot.num_hot_blocks(prompt, min_uses=1) == 0


def test_counters_are_bounded_whatever_arrives() -> None:
    hot = HotPrefixes(BLOCK_SIZE, max_entries=100)
    for index in range(1000):
        hot.record(hint_chain(f"p{index}", 3 * STRIDE), next(LENGTHS), now=0.0)
        assert hot.num_entries <= 2 * (100 + 3)


def test_long_blocks_are_all_counted() -> None:
    """Of blocks of 512 tokens one in eight would see no system prompt shorter than 4,096."""
    hot, system = HotPrefixes(512), hint_chain("system", 3)
    for index in range(10):
        hot.record([*system, *hint_chain(f"user{index}", 1)], next(LENGTHS), now=float(index))
    assert hot.num_hot_blocks([*system, *hint_chain("new", 1)], min_uses=10) == 3


def test_twins_are_one_use_and_prompts_that_differ_within_their_last_block_are_none() -> None:
    hot, prompt = HotPrefixes(BLOCK_SIZE), hint_chain("p", 2 * STRIDE)
    for _ in range(64):
        hot.record(prompt, 1000, now=0.0)
    assert hot.num_uses(prompt, 2 * STRIDE) == 1
    hot.record(prompt, 1001, now=61.0)
    hot.record(prompt, 1000, now=61.0)
    assert hot.num_uses(prompt, 2 * STRIDE) == 2
    hot.record([], 3, now=61.0)


def test_uses_of_blocks_are_told_of_any_blocks_as_far_as_they_are_counted() -> None:
    """Four prompts go on differently after a system prompt: each of its blocks was used four times."""
    hot, system = HotPrefixes(BLOCK_SIZE), hint_chain("system", 4 * STRIDE)
    prompts = [[*system, *hint_chain(f"user{index}", STRIDE)] for index in range(4)]
    for prompt in prompts:
        hot.record(prompt, next(LENGTHS), now=0.0)
    assert hot.sum_of_uses(system) == 4 * 4 * STRIDE
    assert hot.sum_of_uses(prompts[0]) == 4 * 4 * STRIDE + STRIDE
    assert hot.sum_of_uses(hint_chain("never", 4 * STRIDE)) == 0


def test_a_prefix_is_shared_where_prompts_go_on_differently_and_a_conversation_is_not() -> None:
    hot, system = HotPrefixes(BLOCK_SIZE), hint_chain("system", 2 * STRIDE)
    asks = [*system, *hint_chain("asks", STRIDE)]
    assert hot.num_shared_blocks(asks) == 0
    hot.record([*system, *hint_chain("one", STRIDE)], next(LENGTHS), now=0.0)
    assert hot.num_shared_blocks(asks) == 0, "one other is not several"
    hot.record([*system, *hint_chain("two", STRIDE)], next(LENGTHS), now=0.0)
    assert hot.num_shared_blocks(asks) == 2 * STRIDE
    conversation = asks
    for turn in range(5):
        hot.record(conversation, next(LENGTHS), now=0.0)
        conversation = [*conversation, *hint_chain(f"turn{turn}", STRIDE)]
        assert hot.num_shared_blocks(conversation) == 2 * STRIDE, "its history is its own"
    regenerated = [*conversation[: -2 * STRIDE], *hint_chain("again", STRIDE)]
    hot.record(regenerated, next(LENGTHS), now=0.0)
    assert hot.num_shared_blocks([*regenerated[:-STRIDE], *hint_chain("once more", STRIDE)]) == 6 * STRIDE


def test_what_is_shared_is_forgotten_with_its_uses() -> None:
    hot, system = HotPrefixes(BLOCK_SIZE, window_s=60.0), hint_chain("system", STRIDE)
    for number in range(3):
        hot.record([*system, *hint_chain(f"user{number}", STRIDE)], next(LENGTHS), now=0.0)
    assert hot.num_shared_blocks(system) == STRIDE
    hot.record(hint_chain("other", STRIDE), next(LENGTHS), now=61.0)
    assert hot.num_shared_blocks(system) == STRIDE
    hot.record(hint_chain("other", STRIDE), next(LENGTHS), now=122.0)
    assert hot.num_shared_blocks(system) == 0
