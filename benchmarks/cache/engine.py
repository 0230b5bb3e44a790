"""What merging costs a real engine: its tables change, and what it keeps side by side is gathered anew.

Pairs of runs over one runner, append-only and merging in turns, greedy, so that twins stay twins.
Knows the engine; knows neither traffic nor the tree, which has no engine.
"""

from __future__ import annotations

import tempfile
import time
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks import cases, models
from cache.disciplines import CacheDiscipline
from cache.messages import GenerateRequest, SamplingParams
from cache.types import RequestId
from replica.assembly import assemble
from replica.config import ReplicaConfig

BATCH, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 500, 100


@dataclass(frozen=True, slots=True)
class Merged:
    """A batch under both disciplines. CPU seconds, medians."""

    batch: str
    append_only_s: float
    merge_on_fill_s: float
    ratio: float  # median of the pairs', merging over append-only
    ratios: tuple[float, float]  # lowest and highest
    freed_blocks: int  # copies that append-only has and merging has not, at the end
    same_output: bool


def measure(rounds: int, block_size: int) -> list[Merged]:
    """Twins, who fill every block together, and strangers, who never do. Loads a model of 9M weights."""
    with tempfile.TemporaryDirectory() as folder:
        source = models.build(cases.SMALL, Path(folder))
        config = ReplicaConfig(
            model=str(source), block_size=block_size, num_blocks=1024, torch_threads=1, device="cpu"
        )
        assembly = assemble(config)
        batches = {
            "8 twins": [_request(number, same=0) for number in range(BATCH)],
            "8 strangers": [_request(number, same=number) for number in range(BATCH)],
        }

        def run(requests: list[GenerateRequest], discipline: CacheDiscipline) -> _Run:
            core = replace(assembly, config=replace(config, cache_discipline=discipline.value)).core()
            began_s = time.process_time()
            completions = core.complete(requests)
            cpu_s = time.process_time() - began_s
            return _Run(cpu_s, core.stats().cache.cached, [c.token_ids for c in completions])

        found = []
        for name, requests in batches.items():
            pairs = [
                (run(requests, CacheDiscipline.APPEND_ONLY), run(requests, CacheDiscipline.MERGE_ON_FILL))
                for _ in range(rounds + 1)
            ][1:]  # the first pair warms up
            ratios = [merged.cpu_s / kept.cpu_s for kept, merged in pairs]
            found.append(
                Merged(
                    name,
                    median(kept.cpu_s for kept, _ in pairs),
                    median(merged.cpu_s for _, merged in pairs),
                    median(ratios),
                    (min(ratios), max(ratios)),
                    pairs[0][0].cached_blocks - pairs[0][1].cached_blocks,
                    all(kept.outputs == merged.outputs for kept, merged in pairs),
                )
            )
        assembly.runner.close()
    return found


@dataclass(frozen=True, slots=True)
class _Run:
    cpu_s: float
    cached_blocks: int
    outputs: list[tuple[int, ...]]


def _request(number: int, *, same: int) -> GenerateRequest:
    """same: requests of one number have one prompt."""
    vocabulary = cases.SMALL.vocabulary - 3
    prompt = array("i", [3 + (i * i * 31 + i + 7919 * same) % vocabulary for i in range(PROMPT_TOKENS)])
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    return GenerateRequest(RequestId(f"r{number}"), prompt, PROMPT_TOKENS, sampling, seed=number)
