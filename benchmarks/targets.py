"""What the engine has to reach, and whether it did. Judged on CPU time, on the larger model.

Pure: ratios in, verdicts out. Each function yields nothing where no target applies.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.cases import LARGE
from benchmarks.contender import CONTINUOUS, GENERATE
from benchmarks.pairs import Ratio
from benchmarks.rows import Verdict

JUDGED_MODEL = LARGE.name

DECODE_OVER_GENERATE = 1.0  # at least level
DECODE_OVER_CONTINUOUS = 3.0  # at batch 32, where one dense mask over every sequence hurts it
CONTINUOUS_BATCH = 32
MISS_OVER_GENERATE = 0.95  # a miss takes at most 5 % longer
HIT_OVER_MISS = 7.0  # 10 is the limit: a tenth is computed
HIT_RATIO, HIT_PROMPT = 0.9, 4_096
CACHING_COST = 0.01  # of throughput, nothing shared


def steady_decode(model: str, batch: int, ratios: Mapping[str, Ratio]) -> list[Verdict]:
    if model != JUDGED_MODEL:
        return []
    verdicts = [_at_least("steady decode / generate", ratios[GENERATE].cpu.estimate, DECODE_OVER_GENERATE)]
    if batch == CONTINUOUS_BATCH:
        gain = ratios[CONTINUOUS].cpu.estimate
        verdicts.append(_at_least("steady decode / continuous", gain, DECODE_OVER_CONTINUOUS))
    return verdicts


def miss(model: str, ratios: Mapping[str, Ratio]) -> list[Verdict]:
    if model != JUDGED_MODEL:
        return []
    return [_at_least("miss / generate", ratios[GENERATE].cpu.estimate, MISS_OVER_GENERATE)]


def hit(model: str, prompt_tokens: int, ratio: float, gain: Ratio) -> list[Verdict]:
    if (model, prompt_tokens, ratio) != (JUDGED_MODEL, HIT_PROMPT, HIT_RATIO):
        return []
    return [_at_least("90 % hit / miss", gain.cpu.estimate, HIT_OVER_MISS)]


def caching_cost(model: str, cost: float) -> list[Verdict]:
    """cost: the part of time that caching adds, 0.01 = one percent."""
    if model != JUDGED_MODEL:
        return []
    limit = f"<= {100 * CACHING_COST:.1f} %"
    return [Verdict("caching on costs", limit, f"{100 * cost:+.1f} %", cost <= CACHING_COST)]


def _at_least(name: str, measured: float, required: float) -> Verdict:
    return Verdict(name, f">= {required:.2f}x", f"{measured:.2f}x", measured >= required)
