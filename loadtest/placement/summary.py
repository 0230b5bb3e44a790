"""One cell's figures: what tables and plots are made of. Knows a result's arrays; knows no policies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadtest.simulation.cell import CellResult

WARM_UP_SHARE = 1 / 8  # of a window's requests, its first: caches start empty, which says nothing of a policy
LENGTH_LIMITS = (2_048, 8_192, 32_768)  # tokens; short, medium, long and very long prompts
LENGTH_LABELS = ("to 2k", "2k-8k", "8k-32k", "over 32k")


@dataclass(frozen=True, slots=True)
class CellSummary:
    """Figures over a window's requests after those that warm the caches."""

    num_requests: int
    realized_load: float  # arrivals over the rate that fills the fleet
    mean_ttft_s: float
    p50_ttft_s: float
    p99_ttft_s: float
    hit_ratio: float  # prompt tokens taken from a cache over all prompt tokens
    imbalance: float  # prompt tokens computed by the busiest replica over the mean replica's
    mean_e2e_s: float
    mean_tpot_s: float
    mean_ttft_by_length_s: tuple[float | None, ...]  # by `LENGTH_LABELS`; None where there is no such prompt
    last_arrival_s: float  # since the start of the simulation


def summarize(result: CellResult, num_replicas: int, *, num_warming: int | None = None) -> CellSummary:
    """num_replicas: at the start; replicas that came later count as well. num_warming: of the first requests
    those that do not count; None: a window's share."""
    if num_warming is None:
        num_warming = int(len(result.arrival_s) * WARM_UP_SHARE)
    kept = slice(num_warming, None)
    ttft_s, inputs, cached = result.ttft_s[kept], result.input_tokens[kept], result.cached_tokens[kept]
    e2e_s, outputs = result.e2e_s[kept], result.output_tokens[kept]
    several = outputs > 1
    tpot_s = (e2e_s - ttft_s)[several] / (outputs[several] - 1)
    computed = np.bincount(result.replica[kept], weights=inputs - cached, minlength=num_replicas)
    return CellSummary(
        num_requests=len(ttft_s),
        realized_load=_rate_per_s(result) / result.load_1_rate_per_s if result.load_1_rate_per_s else 0.0,
        mean_ttft_s=float(ttft_s.mean()),
        p50_ttft_s=float(np.quantile(ttft_s, 0.5)),
        p99_ttft_s=float(np.quantile(ttft_s, 0.99)),
        hit_ratio=float(cached.sum() / inputs.sum()),
        imbalance=float(computed.max() / computed.mean()),
        mean_e2e_s=float(e2e_s.mean()),
        mean_tpot_s=float(tpot_s.mean()) if len(tpot_s) else 0.0,
        mean_ttft_by_length_s=tuple(
            float(ttft_s[chosen].mean()) if chosen.any() else None for chosen in _by_length(inputs)
        ),
        last_arrival_s=float(result.arrival_s[-1]),
    )


def _rate_per_s(result: CellResult) -> float:
    return float((len(result.arrival_s) - 1) / (result.arrival_s[-1] - result.arrival_s[0]))


def _by_length(
    inputs: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> list[np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    place = np.searchsorted(LENGTH_LIMITS, inputs)  # 0: at most the first limit
    return [place == index for index in range(len(LENGTH_LABELS))]
