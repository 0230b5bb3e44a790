"""The tokens that a step's sequences get: drawn from all logits, or from few where the head can screen them.

Knows sequences, logits and how to have these computed; knows neither batches nor attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from replica.errors import InvalidLogits
from replica.layers.screened_head import ScreenedHead
from replica.output.sampler import Drawing, Drawn, Sampler
from replica.runners.draw_rows import draw_row, masks_of, rows_asked, structures_of
from replica.scheduling.runner import ScheduledSequence


class Drawer:
    """One model's."""

    def __init__(
        self, head: ScreenedHead | None, eos_token_ids: frozenset[int], device: torch.device
    ) -> None:
        """head: the model's own, where it can screen; None where it cannot. device: the model's."""
        self._head = head
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._sampler = Sampler(eos_token_ids)

    def compute(self, sequences: Sequence[ScheduledSequence], forward: Callable[[], torch.Tensor]) -> Drawing:
        """Run the forward, and draw. forward: the logits of these sequences' last rows, in their order; run
        again where screening has not found all that is to be drawn."""
        if self._head is not None:
            drawn = self._screened(self._head, sequences, forward)
            if drawn is not None:
                return Drawing.done(drawn, self._device)
        # The forward first: on a GPU it is only queued, and computed while it is said what is to be drawn.
        return self.begin(sequences, forward())

    def begin(self, sequences: Sequence[ScheduledSequence], logits: torch.Tensor) -> Drawing:
        """Draw from these, a row for each sequence."""
        rows = [draw_row(sequence) for sequence in sequences]
        return self._sampler.begin(logits, rows, masks=masks_of(structures_of(sequences)))

    def _screened(
        self,
        head: ScreenedHead,
        sequences: Sequence[ScheduledSequence],
        forward: Callable[[], torch.Tensor],
    ) -> Drawn | None:
        """None where it does not pay, or has not found all."""
        rows, structures = [draw_row(sequence) for sequence in sequences], structures_of(sequences)
        asked = rows_asked(rows, self._eos_token_ids, structures)
        answered = head.answer(asked, forward) if head.screens(asked, len(rows)) else None
        if answered is None:
            return None
        masks = masks_of({p: structures[row] for p, row in enumerate(answered.computed) if row in structures})
        try:
            in_full = self._sampler.sample(
                answered.logits, [rows[row] for row in answered.computed], masks=masks
            )
        except InvalidLogits as error:
            raise error.at(dict(enumerate(answered.computed))) from None
        tokens = answered.tokens | dict(zip(answered.computed, in_full.tokens, strict=True))
        logprobs = {answered.computed[place]: found for place, found in in_full.logprobs.items()}
        return Drawn([tokens.get(row) for row in range(len(rows))], logprobs)
