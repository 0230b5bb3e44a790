"""What a model says of a prompt's own tokens: log probabilities at every place of a step's chunk.

The step's forward is an ordinary one. What its decoder returned is kept, and the model is asked again for
the logits of more rows, with its decoder answering what it answered before: so a family's own code makes
logits of hidden states (a softcap, a scale), a bounded number of rows at a time. A prompt of 8,000 tokens
over 150,000 words would otherwise be 5 GB of logits.

Knows models, rows and steps; knows neither the schedule nor what becomes of the numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from cache.messages import Logprobs
from replica.attention.step_batch import StepBatch
from replica.models import model_probe
from replica.output import logprobs
from replica.scheduling.runner import ScheduledSequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's part of a step whose tokens are to be scored."""

    sequence: int  # of the step
    first_row: int  # of the batch
    token_ids: array[int]  # the tokens that follow each of its rows, as far as they are the prompt's
    num_top: int


def wanted(sequences: Sequence[ScheduledSequence], order: Sequence[int]) -> list[Chunk]:
    """A step's chunks to score. order: of the sequences, in the rows of the batch. Mostly none."""
    chunks = []
    row = 0
    for index in order:
        item = sequences[index]
        num_top = item.sampling.prompt_logprobs
        if num_top is not None and item.logprobs is not None and item.logprobs.scores_prompt:
            following = item.token_ids[item.start + 1 : item.start + 1 + item.num_new_tokens]
            del following[max(0, item.num_prompt_tokens - item.start - 1) :]
            if following:
                chunks.append(Chunk(index, row, following, num_top))
        row += item.num_new_tokens
    return chunks


class PromptScorer:
    """Scores one step's chunks, right after the forward that computed them."""

    def __init__(self, model: Any, *, takes_rows: bool) -> None:
        """takes_rows: whether the model can be asked for the logits of some rows."""
        self._model = model
        self._takes_rows = takes_rows
        self._kept: Any = None  # what the decoder has returned

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep what the decoder returns in the forward that runs inside."""

        def keep(_module: Any, _arguments: Any, output: Any) -> None:
            self._kept = output

        handle = self._model.get_decoder().register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def score(self, batch: StepBatch, chunks: Sequence[Chunk]) -> dict[int, Logprobs]:
        """By sequence of the step. Inside inference mode, after a forward inside `keeping`."""
        assert self._kept is not None, "the model's decoder is not what its forward calls"
        with self._replaying():
            return {chunk.sequence: self._scored(batch, chunk) for chunk in chunks}

    @contextmanager
    def _replaying(self) -> Iterator[None]:
        """The decoder answers what it answered before, whatever it is asked."""
        decoder, kept = self._model.get_decoder(), self._kept
        own = decoder.__dict__.get("forward")  # of the instance, if something has put one there
        decoder.forward = lambda *_arguments, **_options: kept
        try:
            yield
        finally:
            del decoder.forward
            if own is not None:
                decoder.forward = own

    def _scored(self, batch: StepBatch, chunk: Chunk) -> Logprobs:
        device, vocabulary = batch.input_ids.device, self._model.config.get_text_config().vocab_size
        rows = torch.arange(len(chunk.token_ids), device=device) + chunk.first_row
        tokens = torch.tensor(chunk.token_ids, dtype=torch.int64, device=device)
        if not self._takes_rows:
            return logprobs.scored(self._logits(batch)[rows], tokens, chunk.num_top)
        parts = [
            logprobs.scored(self._logits(batch, logits_to_keep=rows[part]), tokens[part], chunk.num_top)
            for part in logprobs.slices(len(chunk.token_ids), vocabulary)
        ]
        joined = Logprobs.joined(parts)
        assert joined is not None
        return joined

    def _logits(self, batch: StepBatch, **options: Any) -> torch.Tensor:
        return model_probe.run(self._model, batch.input_ids, batch.positions, **options)[0]
