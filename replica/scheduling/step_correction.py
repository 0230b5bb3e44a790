"""How far the fitted step time is off where steps are cut short for the decodes' sake, learned from those.

One linear fit serves steps of one token and of thousands. What a part of a prompt costs beside decodes it
tells to within a quarter or so: reading a long context costs the same however few tokens are computed after
it. A step that was planned to take so long and took longer is what the readers of answers see.

Two factors, each a quantile followed by steps of one size, so that a stray step moves it no further than any
other (Robbins and Monro, 1951): the median of what decodes alone take, and what 95 % of the parts of prompts
take beside them at the most, since it is the slow ones that count.
Arithmetic alone: knows seconds; knows neither requests nor blocks.
"""

from __future__ import annotations

import math

GAIN = 0.05  # of a logarithm: ten slow steps in a row make half as much again of a factor
MEDIAN, MOST = 0.5, 0.95
FURTHEST = 3.0  # either factor, up or down: a fit that is further off is about to be another


class StepCorrection:
    """Factors on what the fit predicts; 1 while nothing has been learned. Owned by the engine thread."""

    def __init__(self) -> None:
        self.decodes = 1.0  # on a step of decodes alone
        self.prompts = 1.0  # on what is added to it; at least 1: no room is made for noise

    def observe(self, *, decodes_s: float, prompts_s: float, elapsed_s: float) -> None:
        """A step was predicted to take `decodes_s` for its decodes and `prompts_s` for what it was cut to.

        prompts_s: 0 if it had nothing else. O(1).
        """
        if elapsed_s <= 0 or decodes_s <= 0:
            return
        if prompts_s <= 0:
            self.decodes = _towards(self.decodes, elapsed_s / decodes_s, MEDIAN, least=1 / FURTHEST)
        else:
            added_s = elapsed_s - self.decodes * decodes_s
            self.prompts = _towards(self.prompts, added_s / prompts_s, MOST, least=1.0)


def _towards(factor: float, seen: float, quantile: float, *, least: float) -> float:
    """A little up, or down; where `quantile` of what is seen lies below it, it stays where it is."""
    step = quantile if seen > factor else quantile - 1
    return min(max(factor * math.exp(GAIN * step), least), FURTHEST)
