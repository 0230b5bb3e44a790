"""One request of a workload, and a workload: plain values without text or tokens.

A prompt is known by its blocks' ids, as published traces know it: two prompts share a prefix exactly as
far as they share leading ids. Knows neither files nor engines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """One prompt and the length of its answer.

    `block_ids[i]` names everything up to the end of block i: the same id in two requests means the same
    tokens from the start of the prompt to there. The last block may be partial.
    """

    arrival_s: float  # since the start of the workload
    input_tokens: int  # at least 1
    output_tokens: int  # at least 1
    block_ids: tuple[int, ...]  # of ceil(input_tokens / block_tokens) blocks, the first block's first
    session: int  # requests of one conversation carry one number
    was_refused: bool = False  # when it was recorded: how long its answer would be is a guess
    # Of several answers to one prompt, which. Each is a request; those after 0 stand right behind it.
    branch: int = 0

    def __post_init__(self) -> None:
        if self.arrival_s < 0:
            raise ValueError(f"arrival_s = {self.arrival_s} is negative")
        if self.input_tokens < 1:
            raise ValueError(f"input_tokens = {self.input_tokens} is less than 1")
        if self.output_tokens < 1:
            raise ValueError(f"output_tokens = {self.output_tokens} is less than 1")


def by_prompt(requests: Iterable[WorkRequest]) -> Iterator[list[WorkRequest]]:
    """The requests in their order, several answers to one prompt together."""
    together: list[WorkRequest] = []
    for request in requests:
        if together and request.branch <= together[-1].branch:
            yield together
            together = []
        together.append(request)
    if together:
        yield together


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, cut into blocks of one size."""

    name: str
    block_tokens: int  # tokens of a full block
    requests: tuple[WorkRequest, ...]  # in order of arrival
    num_keys: int = 1  # that a recording's block ids are made with: what prompts of two share is not known

    def __post_init__(self) -> None:
        """Raises ValueError, naming the request, for one out of order or with the wrong number of blocks."""
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens = {self.block_tokens} is less than 1")
        last_s = 0.0
        for index, request in enumerate(self.requests):
            if request.arrival_s < last_s:
                raise ValueError(f"request {index} arrives at {request.arrival_s} s, before {last_s} s")
            last_s = request.arrival_s
            num_blocks = -(-request.input_tokens // self.block_tokens)
            if len(request.block_ids) != num_blocks:
                raise ValueError(
                    f"request {index} lists {len(request.block_ids)} blocks, "
                    f"but {request.input_tokens} tokens are {num_blocks} of {self.block_tokens}"
                )

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last, seconds; 0 for fewer than two requests."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals per second. Raises ValueError for a workload without duration."""
        if not self.duration_s:
            raise ValueError(f"workload {self.name!r} has no duration, so it has no rate")
        return (len(self.requests) - 1) / self.duration_s

    @property
    def num_further_answers(self) -> int:
        """Requests that are one more answer to the prompt of the request before. O(requests)."""
        return sum(request.branch > 0 for request in self.requests)

    @property
    def num_refused(self) -> int:
        """Requests that were refused when they were recorded. O(requests)."""
        return sum(request.was_refused for request in self.requests)

    def window(self, start_s: float, num_requests: int) -> Workload:
        """The first `num_requests` that arrive at `start_s` or later; times count from the first of them."""
        first = bisect_left(self.requests, start_s, key=lambda request: request.arrival_s)
        chosen = self.requests[first : first + num_requests]
        began_s = chosen[0].arrival_s if chosen else 0.0
        return replace(
            self,
            requests=tuple(replace(request, arrival_s=request.arrival_s - began_s) for request in chosen),
        )
