"""A step that ends before it is full: whose prompt ends with it waits for all that it holds.

    filled up      |<- short prompt ->|<-------- 8,192 tokens of a long one -------->|  both have waited
    ended early    |<- short prompt ->|  its first token; the long one goes on in the next step

One more part keeps each prompt that ends with the step waiting for as long as that part takes. Left for the
next step, it costs what a step takes whatever prompts are in it, and all who are left wait for that: were
each of n computed in a step of its own, the i-th would wait for i such. One more is counted, who comes
meanwhile, since time that is lost delays also whoever comes next. So a step ends before a part where

    prompts that end with it * part_s  >  fixed_s * (n + 1) * (n + 2) / 2

In overload n is large, and steps are full as ever (docs/design/019-scheduling-order.md).
Arithmetic alone: knows token counts and seconds; knows neither requests nor blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache.events import StepTimeModel
from replica.scheduling.step_time import attention_pairs


@dataclass(slots=True)
class EarlyEnd:
    """Of one step, while it is composed."""

    model: StepTimeModel | None  # None: not measured yet, or steps are filled up
    fixed_s: float  # what the step takes without prompts
    num_left: int  # prompts that have no part in it yet
    num_ending: int  # those whose last tokens it holds

    @classmethod
    def beside(
        cls,
        model: StepTimeModel | None,
        num_decodes: int,
        context_tokens: int,
        num_prompts: int,
        num_ending: int = 0,
    ) -> EarlyEnd:
        """context_tokens: of the sequences that decode. num_ending: of those, whose token is their prompt's
        last."""
        fixed_s = model.step_s(num_decodes, float(context_tokens), num_decodes) if model else 0.0
        return cls(model, fixed_s, num_prompts, num_ending)

    def is_before(self, start: int, num_tokens: int) -> bool:
        """Whether the step is to end before it holds a prompt's next tokens, after `start` computed ones."""
        if self.model is None or not self.num_ending:
            return False
        part_s = self.model.step_s(num_tokens, attention_pairs(start, num_tokens), 1) - self.model.base_s
        return self.num_ending * part_s > self.fixed_s * (self.num_left + 1) * (self.num_left + 2) / 2

    def take(self, *, is_last: bool) -> None:
        """One more prompt has a part in the step. is_last: of the prompt."""
        self.num_left -= 1
        self.num_ending += is_last
