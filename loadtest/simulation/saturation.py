"""Load 1.0: the rate at which the work left after a pooled cache's hits fills N engines.

A request's work is what it adds to the engine's steps, by the step-time model: its uncached tokens, their
attention, one place in each step that decodes for it, and its share of the steps' fixed cost. That share
falls as more sequences decode side by side; an engine that is full decodes as many as its memory and its
limit hold, so at saturation a step is shared by so many.
The hits are those of one least-recently-used cache of N times the capacity that sees the requests one by
one, in order of arrival: what no placement can beat but for luck with the order.
Knows blocks, tokens and seconds; knows neither policies nor time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cache.events import StepTimeModel
from loadtest.simulation.machine import Machine
from loadtest.simulation.turns import name_contents
from loadtest.workloads.request import Workload
from replica.scheduling.step_time import attention_pairs


@dataclass(frozen=True, slots=True)
class WorkPerRequest:
    """Of one workload on one fleet; means over its requests."""

    seconds: float  # of one engine's time, at saturation
    uncached_tokens: float  # of the prompt, after the pooled cache's hits
    hit_ratio: float  # of that cache, over prompt tokens; 0 to 1
    decoding: float  # sequences that decode side by side on a full engine


def saturation_rate_per_s(
    workload: Workload, *, num_replicas: int, cache_tokens: int, machine: Machine
) -> float:
    """Requests per second of this mix that are load 1.0 for so many replicas."""
    work = work_per_request(workload, num_replicas=num_replicas, cache_tokens=cache_tokens, machine=machine)
    return machine.engines_at_once(num_replicas) / work.seconds


def work_per_request(
    workload: Workload, *, num_replicas: int, cache_tokens: int, machine: Machine
) -> WorkPerRequest:
    """What a request costs an engine, on average. cache_tokens: of one replica. O(blocks).

    Raises ValueError for a workload without requests.
    """
    requests = workload.requests
    if not requests:
        raise ValueError(f"workload {workload.name!r} has no requests, so no work")
    hits = pooled_hits(workload, num_replicas * cache_tokens)
    decoding = _full_batch(workload, cache_tokens, machine)
    seconds = 0.0
    for prefill_s, decode_s in _work_s(workload, hits, decoding, machine):
        seconds += prefill_s
        seconds += decode_s
    num_tokens = sum(request.input_tokens for request in requests)
    return WorkPerRequest(
        seconds=seconds / len(requests),
        uncached_tokens=(num_tokens - sum(hits)) / len(requests),
        hit_ratio=sum(hits) / num_tokens,
        decoding=decoding,
    )


def work_by_request(
    workload: Workload, *, num_replicas: int, cache_tokens: int, machine: Machine
) -> list[float]:
    """The same, request by request: seconds of one engine's time. O(blocks)."""
    hits = pooled_hits(workload, num_replicas * cache_tokens)
    decoding = _full_batch(workload, cache_tokens, machine)
    return [sum(parts) for parts in _work_s(workload, hits, decoding, machine)]


def pooled_hits(workload: Workload, capacity_tokens: int) -> list[int]:
    """Per request its prompt tokens in one cache that all earlier requests went through.

    Least recently used first, leaves before what they hang on. Answers take room, and are hits for the turn
    that goes on from them, as in an engine's cache.
    """
    size = workload.block_tokens
    capacity = max(1, capacity_tokens // size)
    cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
    hits = []
    for request, blocks in zip(workload.requests, name_contents(workload).blocks, strict=True):
        usable = (request.input_tokens - 1) // size
        num_hit = 0
        while num_hit < usable and blocks[num_hit] in cached:
            num_hit += 1
        hits.append(num_hit * size)
        for number in reversed(blocks):
            cached[number] = None
            cached.move_to_end(number)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hits


def _work_s(
    workload: Workload, hits: Sequence[int], decoding: float, machine: Machine
) -> Iterator[tuple[float, float]]:
    """Seconds that each request's prompt takes of an engine, and its answer."""
    model = machine.step_time()
    for request, cached in zip(workload.requests, hits, strict=True):
        prefill_s = _prefill_s(model, request.input_tokens - cached, cached, machine.max_batched_tokens)
        yield prefill_s, _decode_s(model, request.input_tokens, request.output_tokens - 1, decoding)


def _full_batch(workload: Workload, cache_tokens: int, machine: Machine) -> float:
    """Sequences that decode side by side when an engine has work without end."""
    requests = workload.requests
    # Weighted by the steps each one takes part in: long answers are there more often.
    steps = sum(request.output_tokens for request in requests)
    held = sum(
        request.output_tokens * (request.input_tokens + request.output_tokens / 2) for request in requests
    )
    return max(1.0, min(machine.max_running, cache_tokens * steps / held))


def _prefill_s(model: StepTimeModel, uncached: int, cached: int, max_batched_tokens: int) -> float:
    """A prompt's part of full steps: it pays of each what it takes of the token budget."""
    share = uncached / max_batched_tokens
    return model.step_s(uncached, attention_pairs(cached, uncached), 1) - model.base_s * (1.0 - share)


def _decode_s(model: StepTimeModel, context: int, num_steps: int, decoding: float) -> float:
    """An answer's part of the steps it shares with `decoding` sequences, itself included."""
    if num_steps < 1:
        return 0.0
    attention = num_steps * (context + num_steps / 2)
    return model.step_s(num_steps, attention, num_steps) - model.base_s * (1.0 - num_steps / decoding)
