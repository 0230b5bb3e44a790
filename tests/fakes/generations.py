"""Generations whose prompt is thirteen numbers, and what their replicas do."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator
from typing import Any

from cache.block_hash import BlockHasher
from cache.messages import AnswerSoFar, Delta, FinishReason, GenerateRequest, SamplingParams
from cache.types import ReplicaId, RequestId
from router.dispatch.generation import Generation
from router.dispatch.job import Job
from tests.fakes.http import FINGERPRINT, RouterUnderTest, counting, text_of

PROMPT = array("i", range(1, 14))
HASHER = BlockHasher(FINGERPRINT)
EXPECTED = "".join(map(text_of, range(8)))


def a_generation(
    router: RouterUnderTest, sampling: SamplingParams | None = None, **fields: Any
) -> Generation:
    hashes = tuple(HASHER.chain(HASHER.root(), PROMPT))
    fields = {"request_id": RequestId("r"), **fields}
    job = Job(
        prompt=PROMPT,
        block_hashes=hashes,
        sampling=sampling or SamplingParams(max_tokens=8),
        seed=1,
        **fields,
    )
    return router.parts.service._dispatcher.start(job)


async def run(generation: Generation) -> str:
    return "".join([delta.text async for delta in generation.deltas()])


def failing(error: Exception, after_deltas: int = 0) -> Any:
    """Counts for a while, then raises."""

    async def script(request: GenerateRequest, replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
        sent = 0
        async for delta in counting(request, replica_id):
            if sent == after_deltas:
                raise error
            yield delta
            sent += 1

    return script


def first_only(router: RouterUnderTest, script: Any) -> None:
    """Whoever is asked first follows the script, everybody else counts."""

    async def once(request: GenerateRequest, replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
        chosen = script if request.attempt == 0 else counting
        async for delta in chosen(request, replica_id):
            yield delta

    router.follow(once)


async def count_several(request: GenerateRequest, _replica_id: ReplicaId) -> AsyncGenerator[Delta, None]:
    """Each answer counts, a token at a time, from where it was: even ones to 2, odd ones to 3."""
    answers = request.answers or (AnswerSoFar(array("i"), 0, is_over=False),) * request.n
    for token in range(4):
        for choice, answer in enumerate(answers):
            last = 2 + choice % 2
            if not answer.is_over and len(answer.token_ids) <= token <= last:
                reason = FinishReason.LENGTH if token == last else None
                yield Delta(f"{choice}{token} ", (100 * choice + token,), 4, reason, choice=choice)


def assert_nothing_in_flight(router: RouterUnderTest) -> None:
    statistics = router.parts.routing.statistics()
    assert statistics.in_flight == 0
    assert [replica.in_flight for replica in statistics.replicas] == [0] * len(statistics.replicas)
    assert router.metric("warmpath_requests_in_flight") == 0
    assert router.metric("warmpath_requests_without_token") == 0
