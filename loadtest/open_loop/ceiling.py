"""The hit rate that a cache which forgets nothing would have on a workload: no policy can do better.

Counts prompts only, as they come: what a server has decoded itself is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.workloads.request import WorkRequest


def infinite_cache_hit_ratio(
    requests: Sequence[WorkRequest], block_tokens: int, *, counted_from: int = 0
) -> float:
    """Tokens of leading full blocks seen before, over prompt tokens; 0 for no requests.

    counted_from: requests before it only fill the cache. At least one token of a prompt is computed.
    """
    seen: set[int] = set()
    hit = total = 0
    for index, request in enumerate(requests):
        full = request.block_ids[: (request.input_tokens - 1) // block_tokens]
        num_known = next((at for at, block in enumerate(full) if block not in seen), len(full))
        seen.update(request.block_ids[: request.input_tokens // block_tokens])
        if index >= counted_from:
            hit += num_known * block_tokens
            total += request.input_tokens
    return hit / total if total else 0.0
