"""Several answers to one prompt: one request on the wire, as many inside the engine.

Knows requests and seeds; knows neither steps nor blocks (`Scheduler.submit` lets the answers share those).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from cache.messages import AnswerSoFar, GenerateRequest
from cache.types import RequestId
from replica.errors import InvalidRequest

_NOT_BEGUN = AnswerSoFar(array("i"), sent_chars=0, is_over=False)


def answers_of(request: GenerateRequest) -> list[tuple[int, GenerateRequest]]:
    """Which answers are still wanted, each as a request for one. The first keeps the request's name and seed:
    it is the answer that the request would get with n = 1.

    Raises InvalidRequest for a request that contradicts itself.
    """
    if request.n == 1 and not request.answers:
        return [(0, request)]
    _check(request)
    so_far = request.answers or (_NOT_BEGUN,) * request.n
    return [
        (choice, _answer(request, choice, answer))
        for choice, answer in enumerate(so_far)
        if not answer.is_over
    ]


def have_begun(answers: Sequence[tuple[int, GenerateRequest]]) -> bool:
    """Whether an earlier attempt has generated some of one of them: then each goes on by itself."""
    return any(len(answer.token_ids) > answer.num_prompt_tokens for _, answer in answers)


def answer_seed(seed: int, choice: int) -> int:
    """The seed that answer number `choice` is drawn with: a pure function of both, the seed itself for 0."""
    if choice == 0:
        return seed
    return int.from_bytes(blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()) >> 1  # 63 bits


def _answer(request: GenerateRequest, choice: int, so_far: AnswerSoFar) -> GenerateRequest:
    sampling = request.sampling
    if choice:
        # The prompt is the same: the first answer tells of it for all.
        sampling = replace(sampling, prompt_logprobs=None)
    return replace(
        request,
        request_id=RequestId(f"{request.request_id}/{choice}") if choice else request.request_id,
        token_ids=request.token_ids + so_far.token_ids,
        sampling=sampling,
        seed=answer_seed(request.seed, choice),
        sent_chars=so_far.sent_chars,
        n=1,
        answers=(),
    )


def _check(request: GenerateRequest) -> None:
    if request.n < 1:
        raise InvalidRequest("n", f"{request.n} is less than 1")
    if len(request.answers) not in (0, request.n):
        raise InvalidRequest("answers", f"there are {len(request.answers)} of n = {request.n}")
    if request.answers and all(answer.is_over for answer in request.answers):
        raise InvalidRequest("answers", "none of them is still wanted")
    if request.num_prompt_tokens != len(request.token_ids) or request.sent_chars:
        raise InvalidRequest("token_ids", "of several answers, each has its own output")
    if request.pin is not None:
        raise InvalidRequest("n", "what holds a prompt generates nothing from it")
