"""How many prompt tokens a step may hold beside decodes, so that those are not stalled for long.

    |<-- the decodes alone -->|<-------- prompts -------->|
    |<------------------ at most limit_s ---------------->|

By default there is no limit. One in seconds holds for every step. A relative one (`itl_target_s: null`) gives
prompts as long as the decodes take themselves, once for each prompt that there is to compute: one long prompt
at most doubles the time between tokens, and where many wait, whom nobody answers yet, steps become as large
as they may be: their fixed cost is then paid least often, and no capacity is given up for smooth answers
(docs/design/019-scheduling-order.md). The scheme is Sarathi-Serve's (Agrawal et al., OSDI 2024), with a
measured step time in place of a profiled budget, corrected by what the steps that it cut have taken
(`step_correction.py`).
Arithmetic alone: knows token counts and seconds; knows neither requests nor blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cache.events import StepTimeModel
from replica.scheduling.layer_span import LayerSpan
from replica.scheduling.step_correction import StepCorrection
from replica.scheduling.step_time import attention_pairs

# Of the time that is allowed, what is planned: steps scatter. Where it is as long as the decodes take, it is
# less: that grows while a prompt is computed, and readers compare with what it was before.
PLANNED, PLANNED_AGAIN = 0.9, 0.75

# Tokens of a part that goes through the layers span by span, at the most; and those from which on it may go
# through all of them as well. After 3,300 others, a token takes the 9M model 0.69 ms in parts of 4, 0.48 of 8
# and 0.42 of 16, and 0.41 in parts of 64, a layer a step.
LAYERED_PART, ENOUGH_AT_ONCE = 64, 16
OVER = 0.25  # of a layer, beyond the time: a part is cut for what there was when it began


def limit_s(decodes_s: float, num_prompts: int, itl_target_s: float | None) -> float:
    """How long a step may take in which sequences decode and so many prompts are to be computed.

    decodes_s: what it would take without prompts.
    itl_target_s: seconds between two tokens of an answer; None: relative, see above; inf: however long.
    """
    if itl_target_s is not None:
        return itl_target_s
    return decodes_s * (1 + num_prompts)


@dataclass(slots=True)
class StepRoom:
    """What is left of a step for prompts."""

    model: StepTimeModel | None  # None: not measured yet, so the time is not looked at
    left_s: float  # inf: nobody decodes beside it
    least: int  # tokens that the first prompt gets whatever they take, and none after it gets fewer
    decodes_s: float = 0.0  # what the decodes alone take, by the model; 0: not asked
    prompts_s: float = 0.0  # what prompts have taken of it, by the model
    is_empty: bool = True  # of prompts
    is_full: bool = False  # somebody has asked for room and got none

    @classmethod
    def beside(
        cls,
        model: StepTimeModel | None,
        num_decodes: int,
        context_tokens: int,
        num_prompts: int,
        itl_target_s: float | None,
        least: int,
        correction: StepCorrection,
    ) -> StepRoom:
        """context_tokens: of the sequences that decode. correction: of what the model says."""
        if model is None or not num_decodes or itl_target_s == math.inf:
            return cls(None, math.inf, 0)
        decodes_s = model.step_s(num_decodes, float(context_tokens), num_decodes)
        take_s = correction.decodes * decodes_s
        allowed_s = (limit_s(take_s, num_prompts, itl_target_s) - take_s) / correction.prompts
        planned = PLANNED_AGAIN if itl_target_s is None else PLANNED
        return cls(model, planned * max(0.0, allowed_s), least, decodes_s)

    def fits(self, start: int, num_tokens: int) -> int:
        """Of a prompt's next tokens, after `start` computed ones, how many fit; with 0 it is full."""
        fit = self._in_time(start, num_tokens, self.left_s)
        if fit < min(num_tokens, self.least):
            if self.is_empty:
                return min(num_tokens, self.least)
            self.is_full = True
            return 0
        return fit

    def fits_by_layers(self, start: int, num_tokens: int, num_layers: int) -> int:
        """As `fits`, of an empty step, if they go through some of so many layers in it: through one, or as
        many as fill the time with at most `LAYERED_PART` tokens."""
        fit = 0
        for span in range(1, num_layers):
            fit = self._in_time(start, LAYERED_PART + 1, self.left_s * num_layers / span)
            if fit <= LAYERED_PART:
                break
        return min(num_tokens, LAYERED_PART, max(fit, self.least * num_layers))

    def _in_time(self, start: int, num_tokens: int, left_s: float) -> int:
        model = self.model
        if model is None:
            return num_tokens
        quadratic = model.per_attention_s / 2
        linear = model.per_token_s + model.per_attention_s * start
        seconds = left_s - model.per_sequence_s
        if seconds <= 0:
            return 0
        if linear * num_tokens + quadratic * num_tokens * num_tokens <= seconds:
            return num_tokens
        # Not all fit, so one of the terms is above 0. The larger root, without a difference of near equals.
        root = math.sqrt(linear * linear + 4 * quadratic * seconds)
        return min(num_tokens, int(2 * seconds / (linear + root)))

    def layers(self, start: int, num_tokens: int, span: LayerSpan) -> LayerSpan:
        """The first of these layers through which there is time for so many tokens after `start`; at least as
        many as make up for `least` through all of them."""
        layer_s = self._part_s(start, num_tokens) / span.total
        fit = int(self.left_s / layer_s + OVER) if layer_s > 0 else span.total
        least = -(-self.least * span.total // num_tokens)
        return LayerSpan(span.first, min(span.end, span.first + max(fit, least)), span.total)

    def take(self, start: int, num_tokens: int, share: float = 1.0) -> None:
        """So many of them are in the step now. share: of the layers."""
        self.is_empty = False
        takes_s = share * self._part_s(start, num_tokens)
        self.left_s -= takes_s
        self.prompts_s += takes_s

    def _part_s(self, start: int, num_tokens: int) -> float:
        """What they take through all layers."""
        model = self.model
        if model is None:
            return 0.0
        return model.step_s(num_tokens, attention_pairs(start, num_tokens), 1) - model.base_s
