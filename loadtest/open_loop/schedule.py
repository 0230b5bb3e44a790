"""Who is due when: a workload's arrivals, a stretch of them, faster or slower. Pure values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loadtest.workloads.errors import WorkloadError
from loadtest.workloads.request import Workload, WorkRequest, by_prompt


@dataclass(frozen=True, slots=True)
class Arrival:
    due_s: float  # since the start of the replay
    request: WorkRequest  # of several answers, with the length of the longest
    n: int = 1  # answers


@dataclass(frozen=True, slots=True)
class Stretch:
    """Which part of a trace is replayed, and how fast."""

    start_s: float = 0.0  # of the trace's own time
    duration_s: float | None = None  # the same; None = to its end
    whole_sessions: bool = False  # only sessions that begin inside, and these to their end
    max_requests: int | None = None
    speedup: float = 1.0  # 2: twice the trace's rate; gaps inside sessions shrink with the rest


def schedule(workload: Workload, stretch: Stretch = Stretch()) -> list[Arrival]:  # frozen
    """Arrivals in order, the first of them due at 0. Raises WorkloadError if nobody arrives there."""
    inside = [request for request in workload.requests if _is_inside(request, stretch)]
    if stretch.whole_sessions:
        began: dict[int, float] = {}
        for request in workload.requests:
            began.setdefault(request.session, request.arrival_s)
        chosen = {request.session for request in inside if began[request.session] >= stretch.start_s}
        inside = [request for request in workload.requests if request.session in chosen]
    asked = list(by_prompt(inside))[: stretch.max_requests]
    if not asked:
        raise WorkloadError(f"{workload.name}: nobody arrives in the stretch asked for")
    first_s = asked[0][0].arrival_s
    return [
        Arrival((answers[0].arrival_s - first_s) / stretch.speedup, _longest(answers), len(answers))
        for answers in asked
    ]


def _longest(answers: Sequence[WorkRequest]) -> WorkRequest:
    return replace(answers[0], output_tokens=max(answer.output_tokens for answer in answers))


def _is_inside(request: WorkRequest, stretch: Stretch) -> bool:
    end_s = float("inf") if stretch.duration_s is None else stretch.start_s + stretch.duration_s
    return stretch.start_s <= request.arrival_s < end_s


def shortened(
    arrivals: Sequence[Arrival], *, max_tokens: int | None, max_output: int | None
) -> list[Arrival]:
    """Prompts and answers cut to what the served model can take; blocks go with them.

    Raises WorkloadError if a cut would leave no token.
    """
    found = []
    for arrival in arrivals:
        request = arrival.request
        output = min(request.output_tokens, max_output or request.output_tokens)
        tokens = request.input_tokens
        if max_tokens is not None and tokens + output > max_tokens:
            tokens = max_tokens - output
            if tokens < 1:
                raise WorkloadError(
                    f"an answer of {output} tokens leaves no room for a prompt in {max_tokens}"
                )
        num_blocks = -(-tokens * len(request.block_ids) // request.input_tokens)
        found.append(
            replace(
                arrival,
                request=replace(
                    request,
                    input_tokens=tokens,
                    output_tokens=output,
                    block_ids=request.block_ids[:num_blocks],
                ),
            )
        )
    return found
