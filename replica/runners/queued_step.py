"""A step of a real model on its way: what the device has been given, and what will come of it.

Knows sequences' places and a draw; knows neither models nor pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cache.messages import Logprobs
from replica.errors import InvalidLogits
from replica.output.sampler import Drawing
from replica.scheduling.runner import ScheduledSequence, StepResult
from replica.transfer import to_device


@dataclass(frozen=True, slots=True)
class QueuedStep:
    """A forward and a draw that the device has been given."""

    order: Sequence[int]  # of the sequences, in the rows of the draw
    drawing: Drawing
    prompt_logprobs: Mapping[int, Logprobs] = field(default_factory=dict)  # by sequence

    def tokens_of(self, sequences: Sequence[int]) -> torch.Tensor:
        """What these of its sequences draw, (sequences,) int64, on the device; nobody waits for it."""
        row_by_sequence = {sequence: row for row, sequence in enumerate(self.order)}
        rows = np.array([row_by_sequence[sequence] for sequence in sequences], dtype=np.int64)
        return self.drawing.tokens.index_select(0, to_device(rows, self.drawing.tokens.device))

    def result(self) -> StepResult:
        """Blocks until it is done; how long that took is not known here. Raises InvalidLogits."""
        try:
            drawn = self.drawing.take()
        except InvalidLogits as error:
            raise error.at(dict(enumerate(self.order))) from None
        next_tokens: list[int | None] = [None] * len(self.order)
        for sequence, token_id in zip(self.order, drawn.tokens, strict=True):
            next_tokens[sequence] = token_id
        logprobs = {self.order[row]: found for row, found in drawn.logprobs.items()}
        return StepResult(tuple(next_tokens), 0.0, logprobs, self.prompt_logprobs)


class ModelStep:
    """`LaunchedStep`."""

    def __init__(self, queued: QueuedStep, finish: Callable[[QueuedStep], StepResult]) -> None:
        self.queued = queued
        self._finish = finish

    def result(self) -> StepResult:
        return self._finish(self.queued)


class FailedStep:
    """`LaunchedStep`, one that the device was not given, or not whole."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> StepResult:
        raise self._error


def drawn_tokens(
    sequences: Sequence[ScheduledSequence], before: QueuedStep | None
) -> tuple[list[int], torch.Tensor] | None:
    """Which of these wait for a token of the step before, and those tokens; None if nobody does."""
    waiting = [(place, each.drawn_by) for place, each in enumerate(sequences) if each.drawn_by is not None]
    if not waiting:
        return None
    assert before is not None, "they wait for a step that was not launched"
    return [place for place, _ in waiting], before.tokens_of([drawn_by for _, drawn_by in waiting])
