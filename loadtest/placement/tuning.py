"""The same tuning budget for every policy: so many settings of its knobs, drawn at random around its
defaults.

Knows knobs and their defaults, and no policy in particular. What is tuned on is not what is reported on:
other seeds, one number of replicas.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

from cache.errors import ConfigError
from loadtest.placement.comparison import Comparison, mean_ttft_s
from loadtest.placement.policy_choice import Options, PolicyChoice
from loadtest.text_table import TextTable
from router.policies import POLICIES, check_policy

SPREAD = 8.0  # a knob is drawn between an eighth of its default and eight times it, evenly in the logarithm
CHANGED_SHARE = 0.6  # of a policy's knobs, in a setting: some effects show only together, others only alone
MAX_DRAWS = 1_000  # for one setting that the policy accepts and that is new

# Knobs that are off by default have no size to draw around.
_FOR_ZERO = {float: (0.0, 0.1, 0.25, 0.5, 1.0), int: (0, 64, 256, 1024, 4096)}
_FOR_INFINITE = (math.inf, 2.0, 8.0, 32.0, 128.0)


@dataclass(frozen=True, slots=True)
class Tuned:
    """One policy's best setting of those tried."""

    default: PolicyChoice
    best: PolicyChoice  # the default itself if none was better
    num_settings: int  # tried, the default included
    default_ratio: float  # mean time to first token over the ideal's, geometric mean over windows
    best_ratio: float


def settings(policy: str, budget: int, seed: int) -> list[PolicyChoice]:
    """The defaults and up to `budget - 1` others, fewer where there are no more; a function of the seed."""
    rng = random.Random(f"{policy} {seed}")
    found = [PolicyChoice(policy)]
    for _ in range(MAX_DRAWS):
        if len(found) == budget or not POLICIES[policy].option_names:
            break
        choice = PolicyChoice(policy, options=_draw(policy, rng))
        if choice not in found and _is_accepted(choice):
            found.append(choice)
    return found


def pick(comparison: Comparison, ideal: PolicyChoice, tried: Sequence[PolicyChoice]) -> Tuned:
    """tried: settings of one policy, the default first."""
    ratios = {choice: comparison.ratio_over_settings(choice, ideal, mean_ttft_s).estimate for choice in tried}
    best = min(tried, key=lambda choice: ratios[choice])
    return Tuned(tried[0], best, len(tried), ratios[tried[0]], ratios[best])


def table(found: Sequence[Tuned]) -> TextTable:
    """Best first."""
    rows = [
        (
            tuned.default.name,
            f"{tuned.default_ratio:.3f}",
            f"{tuned.best_ratio:.3f}",
            str(tuned.num_settings),
            tuned.best.label.partition(":")[2] or "its defaults",
        )
        for tuned in sorted(found, key=lambda tuned: tuned.best_ratio)
    ]
    return TextTable(
        "Mean time to first token over the ideal's, before and after tuning",
        ("policy", "defaults", "tuned", "settings tried", "knobs"),
        tuple(rows),
    )


def _draw(policy: str, rng: random.Random) -> Options:
    knobs = {
        field.name: _value(field.default, rng)
        for field in fields(POLICIES[policy].options_type)
        if rng.random() < CHANGED_SHARE
    }
    return tuple(sorted(knobs.items()))


def _value(default: object, rng: random.Random) -> object:
    if isinstance(default, bool):
        return rng.random() < 0.5
    if not isinstance(default, (int, float)):
        return default
    if not default:
        return rng.choice(_FOR_ZERO[type(default)])
    if math.isinf(default):
        return rng.choice(_FOR_INFINITE)
    value = float(f"{default * SPREAD ** rng.uniform(-1.0, 1.0):.3g}")  # as short as a person would write it
    return max(1, round(value)) if isinstance(default, int) else value


def _is_accepted(choice: PolicyChoice) -> bool:
    try:
        check_policy(choice.name, dict(choice.options))
    except ConfigError:
        return False
    return True
