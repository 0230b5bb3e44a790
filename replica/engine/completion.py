"""One whole generation, for callers that do not stream."""

from __future__ import annotations

from dataclasses import dataclass

from cache.messages import FinishReason, Logprobs
from cache.types import RequestId
from replica.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of a request that ended by itself."""

    request_id: RequestId
    token_ids: tuple[int, ...]  # output only, older attempts' included
    text: str
    cached_tokens: int
    finish_reason: FinishReason
    num_preemptions: int
    logprobs: Logprobs | None = None  # of the output tokens drawn here
    prompt_logprobs: Logprobs | None = None  # of the prompt's tokens but the first

    @classmethod
    def of(cls, request: Request) -> Completion:
        """request: one with a finish reason; what was logged of it is taken."""
        assert request.finish_reason is not None
        log, num_tokens = request.logprobs, request.num_output_tokens
        return cls(
            request_id=request.request_id,
            token_ids=tuple(request.token_ids[request.num_prompt_tokens :]),
            text=request.detokenizer.take(),
            cached_tokens=request.cached_tokens or 0,
            finish_reason=request.finish_reason,
            num_preemptions=request.num_preemptions,
            logprobs=None if log is None else log.take_drawn(num_tokens),
            prompt_logprobs=None if log is None else log.take_prompt(),
        )
