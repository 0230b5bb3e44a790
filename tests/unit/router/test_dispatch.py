"""One generation over several attempts: what is retried, where, and what its caller sees."""

from __future__ import annotations

import asyncio
import weakref
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from cache.block_hash import hints
from cache.errors import (
    AdmissionFailed,
    DeadlineExceeded,
    ForwardFailed,
    HandedOver,
    LeftUnread,
    PiecesLost,
    PromptTooLong,
    QueueFull,
    RequestRefused,
    ServingError,
)
from cache.events import FORMAT_VERSION, EventBatch, Load, RequestEnded, StepTimeModel, digest_of
from cache.messages import AnswerSoFar, Delta, FinishReason, GenerateRequest, SamplingParams
from cache.types import HashHint, ReplicaId, RequestId
from router.errors import AllBusy, NoReplica, ReplicaLost, RoutingError
from router.placement.observer import SilentObserver
from router.placement.routing import RouteQuery
from tests.fakes.generations import (
    EXPECTED,
    HASHER,
    PROMPT,
    a_generation,
    assert_nothing_in_flight,
    failing,
    run,
)
from tests.fakes.http import BLOCK_SIZE, RouterUnderTest, counting, text_of
from tests.fakes.router import query


@pytest.fixture
async def router() -> AsyncIterator[RouterUnderTest]:
    async with RouterUnderTest(num_replicas=3, max_attempts=4, max_deaths=3) as under_test:
        yield under_test


def _first_only(router: RouterUnderTest, script: Any) -> None:
    """Whoever is asked first follows the script, everybody else counts."""

    async def once(request: GenerateRequest, replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
        chosen = script if request.attempt == 0 else counting
        async for delta in chosen(request, replica_id):
            yield delta

    router.follow(once)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ReplicaLost("gone"), "replica_lost"),
        (QueueFull(1, 1), "busy"),
        (ForwardFailed("x"), "forward_failed"),
        (RequestRefused("stopping"), "replica_lost"),
        (HandedOver(), "handed_over"),
    ],
)
@pytest.mark.parametrize(("after", "phase"), [(0, "before_first_token"), (2, "mid_stream")])
async def test_it_continues_elsewhere_with_the_same_text(
    router: RouterUnderTest, error: Exception, why: str, after: int, phase: str
) -> None:
    _first_only(router, failing(error, after))
    assert await run(a_generation(router)) == EXPECTED
    (first, _), (second, request) = router.calls.requests
    assert first != second
    assert request.excluded_replicas == {first}
    assert request.num_prompt_tokens == len(PROMPT)
    assert len(request.token_ids) == len(PROMPT) + 2 * after
    assert request.sent_chars == sum(len(text_of(i)) for i in range(2 * after))
    assert router.metric("warmpath_retries_total", why=why, phase=phase) == 1


async def test_who_waits_for_a_first_token_is_told_from_who_has_one(router: RouterUnderTest) -> None:
    """Also while the first of two replicas that it needs has failed, and where nobody reads on."""
    told = list[float]()

    async def script(request: GenerateRequest, name: ReplicaId) -> AsyncGenerator[Delta, None]:
        told.append(router.metric("warmpath_requests_without_token"))
        if len(told) == 1:
            raise ReplicaLost("gone")
        async for delta in counting(request, name):
            yield delta

    router.follow(script)
    async with aclosing(a_generation(router).deltas()) as deltas:
        await anext(deltas)
        assert told == [1, 1]
        assert router.metric("warmpath_requests_without_token") == 0
        assert router.metric("warmpath_requests_in_flight") == 1
    assert_nothing_in_flight(router)


@pytest.mark.parametrize("after", [0, 2])
async def test_lost_deltas_are_nobodys_failure_and_go_on_where_they_are_cached(after: int) -> None:
    async with RouterUnderTest(num_replicas=1, max_attempts=2, max_deaths=1) as router:
        _first_only(router, failing(PiecesLost(), after))
        assert await run(a_generation(router)) == EXPECTED
        (first, _), (second, request) = router.calls.requests
        assert first == second
        assert request.excluded_replicas == frozenset()
        assert len(request.token_ids) == len(PROMPT) + 2 * after
        phase = "mid_stream" if after else "before_first_token"
        assert router.metric("warmpath_retries_total", why="deltas_lost", phase=phase) == 1


@pytest.mark.parametrize(
    ("error", "hears"), [(ReplicaLost("gone"), 1), (QueueFull(1, 1), 0), (PiecesLost(), 0)]
)
async def test_before_it_goes_on_elsewhere_whoever_decides_hears_that_a_replica_lost_it(
    router: RouterUnderTest, monkeypatch: pytest.MonkeyPatch, error: Exception, hears: int
) -> None:
    sent, heard = router.calls.requests, list[int]()  # how many were sent by then
    monkeypatch.setattr(router.parts.routing, "request_lost", lambda: heard.append(len(sent)))
    _first_only(router, failing(error, 2))
    assert await run(a_generation(router)) == EXPECTED
    assert heard == [1] * hears


@pytest.mark.parametrize("binding", ["late", "at_once"])
async def test_an_answer_whose_deltas_were_lost_is_not_refused_while_others_wait_too_long(
    binding: str,
) -> None:
    """It was let in once, and its client has a part of it: it is no newcomer, though it excludes nobody."""
    async with RouterUnderTest(num_replicas=2, binding=binding, max_wait_s=1.0) as router:
        step_time = StepTimeModel(base_s=0.01, per_token_s=0.001, per_attention_s=0.0, per_sequence_s=0.001)
        idle = Load(free_blocks=1000, total_blocks=1000, step_time=step_time)

        def report(load: Load) -> None:
            for name in router.replicas:
                router.parts.routing.on_load(name, load)

        async def lose_in_a_crowd(request: GenerateRequest, name: ReplicaId) -> AsyncGenerator[Delta, None]:
            async for delta in counting(request, name):
                yield delta
                report(msgspec.structs.replace(idle, queued_uncached_tokens=20_000, num_waiting=3))
                with pytest.raises(AllBusy):
                    await run(a_generation(router, request_id=RequestId("newcomer")))
                asyncio.get_running_loop().call_later(0.01, report, idle)
                raise PiecesLost

        report(idle)
        _first_only(router, lose_in_a_crowd)
        assert await run(a_generation(router)) == EXPECTED
        assert_nothing_in_flight(router)


@pytest.mark.parametrize("binding", ["late", "at_once"])
@pytest.mark.parametrize("error", [ReplicaLost("gone"), PiecesLost()])
async def test_an_answer_that_lost_its_replica_waits_for_room_where_all_are_full(
    binding: str, error: Exception
) -> None:
    """With `at_once` it was refused as one too many, in the middle of the answer."""
    async with RouterUnderTest(num_replicas=3, binding=binding) as router:
        full = Load(num_waiting=10**6, free_blocks=1000, total_blocks=1000)

        def report(load: Load) -> None:
            for name in router.parts.routing.replicas:
                router.parts.routing.on_load(name, load)

        async def lose_among_full_ones(
            request: GenerateRequest, name: ReplicaId
        ) -> AsyncGenerator[Delta, None]:
            async for delta in counting(request, name):
                yield delta
                report(full)
                with pytest.raises(AllBusy):
                    router.parts.routing.choose(query("somebody else"))
                asyncio.get_running_loop().call_later(0.05, report, Load(free_blocks=1000, total_blocks=1000))
                raise error

        _first_only(router, lose_among_full_ones)
        assert await run(a_generation(router)) == EXPECTED
        assert len(router.calls.requests) == 2
        assert router.parts.dispatcher.placer.num_held == 0
        assert_nothing_in_flight(router)


class Refusals(SilentObserver):
    """Who was refused, and who was served."""

    def __init__(self) -> None:
        self.refused_tokens: list[int] = []
        self.num_finished = 0
        self.answers: Sequence[int] = ()

    def refused(self, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        assert len(hints) == query.num_prompt_tokens // BLOCK_SIZE
        self.refused_tokens.append(query.num_prompt_tokens)

    def finished(self, request_id: RequestId, hints: Sequence[HashHint], answers: Sequence[int]) -> None:
        self.num_finished += 1
        self.answers = answers


@pytest.mark.parametrize("binding", ["late", "at_once"])
async def test_watchers_hear_of_who_was_refused(binding: str) -> None:
    """Also of who gave up while it was held: all of them came, though nobody ever had them."""
    refusals = Refusals()
    async with RouterUnderTest(num_replicas=1, binding=binding, max_wait_s=1.0) as router:
        routing = router.parts.routing
        routing.watch(refusals)
        routing.on_load(router.replicas[0], Load(num_waiting=10**6, free_blocks=1000, total_blocks=1000))
        with pytest.raises(AllBusy if binding == "at_once" else DeadlineExceeded):
            await run(a_generation(router, timeout_s=0.05))
        routing.update_replicas({})
        with pytest.raises(NoReplica):
            await run(a_generation(router, request_id=RequestId("late")))
    assert refusals.refused_tokens == [len(PROMPT)] * 2
    assert refusals.num_finished == 0


async def test_watchers_hear_of_who_was_served_once(router: RouterUnderTest) -> None:
    refusals = Refusals()
    router.parts.routing.watch(refusals)
    generation = a_generation(router)
    await run(generation)
    generation.close()
    a_generation(router, request_id=RequestId("never begun")).close()
    assert (refusals.refused_tokens, refusals.num_finished) == ([], 1)


async def test_watchers_hear_of_each_answer(router: RouterUnderTest) -> None:
    refusals = Refusals()
    router.parts.routing.watch(refusals)
    router.follow(_several)
    lengths = [0, 0, 0]
    async for delta in a_generation(router, n=3).deltas():
        lengths[delta.choice] += len(delta.token_ids)
    assert refusals.answers == lengths == [3, 4, 3]


async def test_a_replica_hears_how_long_a_request_has_waited(router: RouterUnderTest) -> None:
    """Of all its attempts: its age counts in the next replica's queue."""

    async def late_loss(request: GenerateRequest, replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
        await asyncio.sleep(0.05)
        raise ReplicaLost("gone")
        yield

    _first_only(router, late_loss)
    await run(a_generation(router))
    first, second = [request.waited_s for _, request in router.calls.requests]
    assert 0.0 <= first <= second - 0.05


async def test_the_next_attempt_is_matched_on_prompt_and_tokens_so_far(router: RouterUnderTest) -> None:
    _first_only(router, failing(ReplicaLost("gone"), 2))
    await run(a_generation(router))
    _, request = router.calls.requests[1]
    assert list(request.block_hashes) == HASHER.chain(HASHER.root(), request.token_ids)
    assert len(request.block_hashes) == (len(PROMPT) + 4) // BLOCK_SIZE


async def test_a_prompt_that_is_scored_is_not_priced_by_hits_it_does_not_take(
    router: RouterUnderTest,
) -> None:
    """`echo` with log probabilities computes every token, wherever its prefix may be cached."""
    routing = router.parts.routing
    holder = sorted(routing.replicas)[-1]
    stored = tuple(hints(HASHER.chain(HASHER.root(), PROMPT)))
    routing.on_events(holder, EventBatch(FORMAT_VERSION, 1, 1, stored, (), digest_of(stored), Load()))
    plain = a_generation(router)
    await run(plain)
    assert (plain.replica_id, plain.overlap_blocks) == (holder, len(PROMPT) // BLOCK_SIZE)
    scored = a_generation(router, sampling=SamplingParams(max_tokens=8, logprobs=1, prompt_logprobs=1))
    await run(scored)
    assert scored.overlap_blocks == 0
    assert router.metric("warmpath_decisions_total", policy="expected_time", reason="cold") == 1


@pytest.mark.parametrize("num_sent", [0, 2])
async def test_once_a_prompt_is_scored_its_stream_is_continued_where_it_is_cached(
    router: RouterUnderTest, num_sent: int
) -> None:
    """Its log probabilities come with the first token: after that nobody computes all of it again."""
    _first_only(router, failing(ReplicaLost("gone"), num_sent))
    await run(a_generation(router, sampling=SamplingParams(max_tokens=8, logprobs=1, prompt_logprobs=1)))
    first, second = (request for _, request in router.calls.requests)
    chain = HASHER.chain(HASHER.root(), second.token_ids)
    assert list(first.block_hashes) == []
    assert list(second.block_hashes) == (chain if num_sent else [])


async def test_a_stream_that_ends_without_finish_reason_is_a_lost_replica(router: RouterUnderTest) -> None:
    async def short(request: GenerateRequest, replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
        yield Delta(text_of(0), (100,), 0)

    _first_only(router, short)
    assert await run(a_generation(router)) == EXPECTED


async def test_when_all_are_busy_the_client_hears_busy(router: RouterUnderTest) -> None:
    router.follow(failing(QueueFull(1, 1)))
    with pytest.raises(QueueFull):
        await run(a_generation(router))
    assert len({replica_id for replica_id, _ in router.calls.requests}) == 3


async def test_a_failing_forward_is_tried_once_more(router: RouterUnderTest) -> None:
    router.follow(failing(ForwardFailed("x")))
    with pytest.raises(ForwardFailed):
        await run(a_generation(router))
    assert len(router.calls.requests) == 2


@pytest.mark.parametrize("error", [PromptTooLong(9, 8), DeadlineExceeded(1, 2), LeftUnread(9, 8)])
async def test_what_no_replica_would_do_better_is_not_retried(
    router: RouterUnderTest, error: ServingError
) -> None:
    router.follow(failing(error))
    with pytest.raises(type(error)):
        await run(a_generation(router))
    assert len(router.calls.requests) == 1


async def test_without_another_replica_a_lost_one_means_no_replica() -> None:
    async with RouterUnderTest(num_replicas=1) as alone:
        alone.follow(failing(ReplicaLost("gone")))
        with pytest.raises(NoReplica):
            await run(a_generation(alone))


async def test_who_accepted_is_excluded_even_if_it_was_not_the_first_rank(router: RouterUnderTest) -> None:
    async def accepted_by_the_last(request: GenerateRequest, _: ReplicaId) -> AsyncGenerator[Delta, None]:
        router.parts.routing.routed(request.request_id, request.ranks[-1])
        router.parts.routing.replica_lost(request.ranks[-1])  # Serve tells of the death before we see it
        raise ReplicaLost("gone")
        yield

    _first_only(router, accepted_by_the_last)
    assert await run(a_generation(router)) == EXPECTED
    (_, first), (_, second) = router.calls.requests
    assert second.excluded_replicas == {first.ranks[-1]}


@pytest.mark.parametrize("deltas_taken", [0, 1, 3])
async def test_closing_it_cancels_the_call_and_releases_the_booking(
    router: RouterUnderTest, deltas_taken: int
) -> None:
    deltas = a_generation(router).deltas()
    for _ in range(deltas_taken):
        await anext(deltas)
    await deltas.aclose()
    assert router.calls.running == 0
    assert router.calls.cancelled == (1 if deltas_taken else 0)
    assert_nothing_in_flight(router)


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (ReplicaLost("gone"), NoReplica),  # nobody is left, and it was no one's doing
        (QueueFull(1, 1), QueueFull),
        (ForwardFailed("x"), ForwardFailed),
        (ValueError("bug"), ValueError),
    ],
)
async def test_whatever_happens_nothing_stays_booked(
    router: RouterUnderTest, error: Exception, seen: type[Exception]
) -> None:
    router.follow(failing(error, 1))
    with pytest.raises(seen):
        await run(a_generation(router))
    assert_nothing_in_flight(router)


async def test_expected_and_actual_hits_are_counted(router: RouterUnderTest) -> None:
    async def cached(request: GenerateRequest, replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
        async for delta in counting(request, replica_id):
            yield Delta(delta.text, delta.token_ids, 8, delta.finish_reason)

    router.follow(cached)
    first, second = a_generation(router), a_generation(router)
    await run(first)
    await run(second)
    assert first.overlap_blocks == 0
    assert second.overlap_blocks == 3  # predicted when the first was routed
    assert second.cached_tokens == 8
    assert second.replica_id == first.replica_id
    assert router.metric("warmpath_hit_tokens_total", stage="captured") == 12
    assert router.metric("warmpath_hit_tokens_total", stage="delivered") == 16


async def _several(request: GenerateRequest, _replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
    """Each answer counts, a token at a time, from where it was: even ones to 2, odd ones to 3."""
    answers = request.answers or (AnswerSoFar(array("i"), 0, is_over=False),) * request.n
    for token in range(4):
        for choice, answer in enumerate(answers):
            last = 2 + choice % 2
            if not answer.is_over and len(answer.token_ids) <= token <= last:
                reason = FinishReason.LENGTH if token == last else None
                yield Delta(f"{choice}{token} ", (100 * choice + token,), 4, reason, choice=choice)


async def test_several_answers_go_on_elsewhere_each_from_where_it_was(router: RouterUnderTest) -> None:
    """One has ended, two have not: the next replica is told of each, and none says anything twice."""

    async def lost(request: GenerateRequest, replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
        sent = 0
        async for delta in _several(request, replica_id):
            if request.attempt == 0 and sent == 8:
                raise ReplicaLost("gone")
            sent += 1
            yield delta

    router.follow(lost)
    texts = {0: "", 1: "", 2: ""}
    async for delta in a_generation(router, n=3).deltas():
        texts[delta.choice] += delta.text
    assert texts == {0: "00 01 02 ", 1: "10 11 12 13 ", 2: "20 21 22 "}
    (_, first), (_, second) = router.calls.requests
    assert (first.n, first.answers) == (3, ())
    assert second.token_ids == PROMPT
    assert [answer.token_ids.tolist() for answer in second.answers] == [
        [0, 1, 2],
        [100, 101, 102],
        [200, 201],
    ]
    assert [answer.sent_chars for answer in second.answers] == [9, 9, 6]
    assert [answer.is_over for answer in second.answers] == [True, False, False]
    assert second.num_answers_left == 2


async def test_a_stream_that_ends_before_the_last_answer_has_is_a_lost_replica(
    router: RouterUnderTest,
) -> None:
    async def first_answer_only(
        request: GenerateRequest, replica_id: ReplicaId
    ) -> AsyncGenerator[Delta, None]:
        async for delta in _several(request, replica_id):
            if request.attempt or delta.choice == 0:
                yield delta

    router.follow(first_answer_only)
    finished = [d.choice async for d in a_generation(router, n=2).deltas() if d.finish_reason is not None]
    assert sorted(finished) == [0, 1]
    assert len(router.calls.requests) == 2


async def test_what_is_computed_for_nobody_is_still_its_tenants(
    router: RouterUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn at the Router went by what was read."""
    served: list[tuple[str, int]] = []
    placer = router.parts.dispatcher.placer
    monkeypatch.setattr(placer, "served", lambda tenant, num_tokens, _: served.append((tenant, num_tokens)))
    spent: list[int] = []
    generation = a_generation(router, tenant="acme", spend=spent.append)
    async with aclosing(generation.deltas()) as deltas:
        await anext(deltas)
    ((replica_id, request),) = router.calls.requests
    ended = RequestEnded(request.request_id, request.attempt, 8)
    router.parts.routing.on_load(replica_id, Load(ended=(ended,)))
    assert (served, spent) == ([("acme", 2), ("acme", 6)], [2, 6])
    assert len(router.parts.dispatcher.accounts) == 0


async def test_an_account_keeps_no_prompt(router: RouterUnderTest) -> None:
    """An engine may tell of it for a minute yet, and the whole generation was kept for that."""
    generation = a_generation(router)
    async with aclosing(generation.deltas()) as deltas:
        await anext(deltas)
    assert len(router.parts.dispatcher.accounts) == 1
    kept = weakref.ref(generation)
    del generation, deltas
    assert kept() is None


@pytest.mark.parametrize("error", [QueueFull(1, 1), NoReplica(), AllBusy(1, 1.0), AdmissionFailed("x")])
async def test_what_no_engine_has_taken_in_leaves_no_account(
    router: RouterUnderTest, error: ServingError
) -> None:
    """No engine tells of it, and a refusal is what there are most of when there is least room."""
    router.follow(failing(error))
    with pytest.raises((RequestRefused, RoutingError)):
        await run(a_generation(router))
    assert router.calls.requests
    assert len(router.parts.dispatcher.accounts) == 0


async def test_who_reads_to_the_end_leaves_no_account(router: RouterUnderTest) -> None:
    await run(a_generation(router))
    assert len(router.parts.dispatcher.accounts) == 0
