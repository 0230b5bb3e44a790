"""The tree of runs against plain counting, and its bounds under any traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from cache.types import HashHint, RequestId
from router.insight.hot_chains import HotChains
from router.placement.decision import DecisionRecord, RouteQuery, RouteReason
from router.placement.ranking import Ranking
from router.pricing.cost import RequestShape
from tests.fakes.router import BLOCK_SIZE, FakeClock, query, replica_id

Prompt = tuple[int, ...]  # a letter for each block
prompts = st.lists(st.lists(st.integers(0, 2), max_size=9).map(tuple), max_size=30)


def hints_of(prompt: Prompt) -> list[HashHint]:
    """Chained, as block hashes are: each names everything up to its block."""
    return [HashHint(_number(prompt[: end + 1])) for end in range(len(prompt))]


def _number(prefix: Prompt) -> int:
    number = 0
    for letter in prefix:
        number = number * 3 + letter + 1
    return number


def decide(chains: HotChains, name: str, prompt: Prompt, cached: Sequence[int] = (0,)) -> None:
    asked: RouteQuery = query(name, 0, num_prompt_tokens=len(prompt) * BLOCK_SIZE + 1)
    ranking = Ranking([], cached, [], [], frozenset(), 0.0)
    record = DecisionRecord(
        asked.request_id,
        0.0,
        "expected_time",
        RequestShape(asked.num_prompt_tokens),
        ranking,
        frozenset(),
        RouteReason.COLD,
    )
    chains.decided(record, asked, hints_of(prompt))


def counted(asked: Sequence[Prompt]) -> Counter[Prompt]:
    """Every prefix, and how many prompts have it."""
    return Counter(prompt[: end + 1] for prompt in asked for end in range(len(prompt)))


@given(asked=prompts)
def test_every_prefix_is_in_one_run_that_counts_it_exactly(asked: list[Prompt]) -> None:
    chains = HotChains(BLOCK_SIZE, clock=FakeClock())
    for number, prompt in enumerate(asked):
        decide(chains, f"r{number}", prompt)
    with_blocks = [prompt for prompt in asked if prompt]
    truth = counted(with_blocks)
    shown = chains.hottest(10_000)

    # Blocks of all runs together are all prefixes there are, and none twice.
    assert sum(run.end - run.start for run in shown) == len(truth) == chains.num_blocks
    assert len({run.name for run in shown}) == len(shown)
    # A run ends where its prompts part or one of them ends, and begins where its parent ends.
    ends = Counter((run.end, round(run.share * len(with_blocks))) for run in shown)
    branches = Counter(
        (len(prefix), count)
        for prefix, count in truth.items()
        if [truth[(*prefix, letter)] for letter in range(3)].count(count) == 0
    )
    assert ends == branches
    for run in shown:
        assert run.start == (shown[run.parent].end if run.parent is not None else 0)
        assert run.parent is None or shown[run.parent].share >= run.share


@given(asked=prompts, most=st.integers(1, 6))
def test_the_heaviest_come_first(asked: list[Prompt], most: int) -> None:
    chains = HotChains(BLOCK_SIZE, clock=FakeClock())
    for number, prompt in enumerate(asked):
        decide(chains, f"r{number}", prompt)
    everything, some = chains.hottest(10_000), chains.hottest(most)
    assert some == everything[:most]
    assert [run.share for run in everything] == sorted([run.share for run in everything], reverse=True)


@given(asked=prompts, max_runs=st.integers(9, 14), max_blocks=st.integers(9, 20))
def test_it_stays_within_its_bounds_and_never_counts_too_much(
    asked: list[Prompt], max_runs: int, max_blocks: int
) -> None:
    chains = HotChains(BLOCK_SIZE, clock=FakeClock(), max_runs=max_runs, max_blocks=max_blocks)
    for number, prompt in enumerate(asked):
        decide(chains, f"r{number}", prompt)
        chains.first_token(RequestId(f"r{number}"), replica_id(0), len(prompt) * BLOCK_SIZE)
        shown = chains.hottest(10_000)
        assert len(shown) == chains.num_runs <= max_runs
        assert sum(run.end - run.start for run in shown) == chains.num_blocks <= max_blocks
        with_blocks = [prompt for prompt in asked[: number + 1] if prompt]
        most = Counter(len(prefix) for prefix in counted(with_blocks))
        assert all(run.hit_ratio is None or run.hit_ratio <= 1.0 for run in shown)
        assert all(most[run.end] for run in shown)
        chains.finished(RequestId(f"r{number}"), (), ())
    assert chains.num_open == 0


@given(first=st.integers(1, 9), second=st.integers(1, 9), cached=st.integers(0, 9))
def test_cached_blocks_are_leading_blocks_wherever_a_run_is_cut(first: int, second: int, cached: int) -> None:
    """What is known of hits survives a cut: the runs' cached blocks sum to the engine's count."""
    long, short = sorted((first, second), reverse=True)
    cached = min(cached, long)
    chains = HotChains(BLOCK_SIZE, clock=FakeClock())
    decide(chains, "long", (0,) * long)
    chains.first_token(RequestId("long"), replica_id(0), cached * BLOCK_SIZE)
    decide(chains, "short", (0,) * short)
    held = sum((run.end - run.start) * (run.hit_ratio or 0.0) for run in chains.hottest(10))
    assert abs(held - cached) < 1e-9
