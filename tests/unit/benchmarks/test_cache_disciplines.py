"""The traffic is what it says, and a replay accounts for every token of it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.cache import report
from benchmarks.cache.jobs import KINDS, Job, generated_jobs, trace_jobs
from benchmarks.cache.pages import Paged
from benchmarks.cache.replay import Replayed, replay
from benchmarks.cache.timed import VERBS, TimedCache
from cache.block_hash import BlockHasher
from cache.disciplines import CacheDiscipline, paged_cache
from cache.prefix_cache import PrefixCache
from cache.radix_cache import RadixCache
from loadtest.placement.suites import EXCERPT
from loadtest.simulation.machine import H100_8B
from tests.fakes.cache import a_fingerprint

MEMORY = 40_000  # tokens


def a_cache(discipline: CacheDiscipline) -> PrefixCache:
    hasher = BlockHasher(a_fingerprint(block_size=16))
    if discipline is CacheDiscipline.RADIX_TREE:
        return RadixCache(MEMORY, hasher)
    return paged_cache(discipline, MEMORY // 16, hasher, block_size=16)


def begins(longer: Job, shorter: Job) -> bool:
    text = shorter.prompt + shorter.answer
    return longer.prompt[: len(text)] == text


def shared(one: Job, other: Job) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one.prompt, other.prompt, strict=False)) if a != b),
        min(len(one.prompt), len(other.prompt)),
    )


class TestTraffic:
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_same_arguments_give_the_same_jobs(self, kind: str) -> None:
        jobs = generated_jobs(kind, 30, 1)
        assert jobs == generated_jobs(kind, 30, 1) != generated_jobs(kind, 30, 2)
        assert all(one.arrival_s <= other.arrival_s for one, other in pairwise(jobs))
        assert all(job.prompt and job.answer for job in jobs)

    def test_a_chats_turn_begins_with_all_before_it(self) -> None:
        jobs = generated_jobs("chats", 60, 0)
        assert sum(any(begins(job, earlier) for earlier in jobs[:n]) for n, job in enumerate(jobs)) > 5

    def test_few_shot_questions_share_their_examples_and_part_to_the_token(self) -> None:
        first, second = generated_jobs("few_shot", 2, 0)
        assert 200 < shared(first, second) < min(len(first.prompt), len(second.prompt))

    def test_twins_are_alike(self) -> None:
        jobs = generated_jobs("twins", 8, 0)
        assert any(one == other for one, other in pairwise(jobs))

    def test_a_traces_turn_begins_with_the_answer_before_it(self) -> None:
        jobs = trace_jobs(EXCERPT, 300, 0)
        assert len(jobs) == 300
        assert any(begins(job, earlier) for n, job in enumerate(jobs) for earlier in jobs[:n])


class TestReplay:
    @pytest.mark.parametrize("discipline", CacheDiscipline)
    def test_what_is_not_found_is_computed(self, discipline: CacheDiscipline) -> None:
        """Once: but for the last token of each answer, which nobody needs."""
        jobs, cache, ended = generated_jobs("twins", 12, 0), a_cache(discipline), list[int]()
        found = replay(cache, cache.stats().total, jobs, H100_8B, ended.append, each_step=lambda: None)
        assert found.num_preemptions == 0
        total = sum(len(job.prompt) + len(job.answer) - 1 for job in jobs)
        assert found.hit_tokens + found.computed_tokens == total
        assert found.hit_tokens > 0
        assert ended == list(range(1, 13))
        assert cache.stats().used == 0

    def test_a_timed_cache_changes_nothing(self) -> None:
        jobs = generated_jobs("chats", 8, 0)
        bare, timed = (
            a_cache(CacheDiscipline.MERGE_ON_FILL),
            TimedCache(a_cache(CacheDiscipline.MERGE_ON_FILL)),
        )
        results: list[Replayed] = [
            replay(cache, MEMORY // 16, jobs, H100_8B, lambda ended: None, each_step=lambda: None)
            for cache in (bare, timed)
        ]
        assert results[0] == results[1]
        assert timed.total_us() > 0
        assert all(timed.median_us(verb) >= 0 for verb in VERBS)


def test_the_tables_have_a_line_per_row() -> None:
    replayed = Replayed(1000, 250, 750, 0.1, 10, 0, 1.0)
    rows = [
        report.Row("chats", name, replayed, 0.01, dict.fromkeys(VERBS, 1.0), 5.0)
        for name in ("append_only", "radix_tree")
    ]
    assert rows[0].hit_ratio == 0.25
    assert report.table(rows).row_count == 2
    assert report.page_table([Paged(1, 2.0, 3.0)]).row_count == 1
