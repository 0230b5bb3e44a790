"""What is hot is what a count of every prompt, block by block, says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache.types import HashHint
from router.placement.hot_prefixes import STRIDE_TOKENS, HotPrefixes
from tests.fakes.router import hint_chain

STRIDE = 2
BLOCK_SIZE = STRIDE_TOKENS // STRIDE
PATHS = st.lists(st.integers(0, 1), max_size=12)  # prompts as paths in a tree: a letter per block


def _chain(path: list[int]) -> list[HashHint]:
    return [hint_chain("".join(map(str, path[: depth + 1])), 1)[0] for depth in range(len(path))]


@given(prompts=st.lists(PATHS, max_size=12), asked=PATHS, min_uses=st.integers(1, 5))
def test_hot_blocks_are_those_that_so_many_prompts_begin_with(
    prompts: list[list[int]], asked: list[int], min_uses: int
) -> None:
    hot = HotPrefixes(BLOCK_SIZE)
    for number, path in enumerate(prompts):
        hot.record(_chain(path), number, now=4.0 * number)
    depths = range(STRIDE, len(asked) + 1, STRIDE)
    uses = [sum(path[:depth] == asked[:depth] for path in prompts) for depth in depths]
    expected = STRIDE * sum(count >= min_uses for count in uses)
    assert hot.num_hot_blocks(_chain(asked), min_uses) == expected
    if expected:
        assert hot.num_uses(_chain(asked), expected) == uses[expected // STRIDE - 1]


@given(prompts=st.lists(PATHS, max_size=12), asked=PATHS, num_held=st.integers(0, 12))
def test_what_was_used_behind_a_held_prefix_is_what_counts_say_beyond_it(
    prompts: list[list[int]], asked: list[int], num_held: int
) -> None:
    hot, chain = HotPrefixes(BLOCK_SIZE), _chain(asked)
    for number, path in enumerate(prompts):
        hot.record(_chain(path), number, now=4.0 * number)
    assert hot.num_used_after(chain, num_held) == max(0, hot.num_hot_blocks(chain, 1) - num_held)
