"""Presence, frequency and repetition penalties, over counts that grow by a token a step.

    row's table   [0, length) distinct tokens, how often the output has each   [length, room) copies of [0]

Copies, so that every place of the table may be read, changed and written back: equal places write equal
values. A row that pays for repetition counts its prompt's tokens too, as often as the output has them: none.
A table holds distinct tokens only, so it never outgrows the vocabulary. Meaning and order are vLLM's:
repetition (over prompt and output) divides a positive logit and multiplies another, then frequency and
presence (over output) are taken off.

Knows token ids, counts and logits; knows neither requests nor draws.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cache.messages import SamplingParams
from replica.transfer import to_device

# Places beyond what a table needs when it is made: so many steps later, at the earliest, it is made anew.
SPARE_PLACES = 64


@dataclass(frozen=True, slots=True)
class PenalisedRow:
    """One row of logits with penalties. Its array of tokens is what knows it from step to step."""

    row: int  # of the logits
    sampling: SamplingParams
    token_ids: array[int]  # prompt + output so far; only ever appended to
    num_prompt_tokens: int


class PenaltyTable:
    """The penalised rows of one batch, as long as its members stay. One thread at a time."""

    def __init__(
        self,
        rows: Sequence[PenalisedRow],
        vocabulary: int,
        device: torch.device,
        earlier: PenaltyTable | None = None,
    ) -> None:
        """earlier: the table of the batch before; rows that are in it are not counted from the start."""
        self._rows = rows
        self._device = device
        self._num_counted = [len(row.token_ids) for row in rows]

        def column(values: list[float]) -> torch.Tensor:
            return to_device(np.array(values, dtype=np.float32), device)[:, None]

        self._repetition = column([row.sampling.repetition_penalty for row in rows])
        self._frequency = column([row.sampling.frequency_penalty for row in rows])
        self._presence = column([row.sampling.presence_penalty for row in rows])
        starts = np.array([row.row * vocabulary for row in rows], dtype=np.int64)
        self._row_starts = to_device(starts, device)[:, None]
        self._fill([earlier.counted(row) if earlier else None for row in rows])

    def counted(self, row: PenalisedRow) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None:
        """A row's tokens and counts, if this table has it and knows all but its newest tokens."""
        for index, mine in enumerate(self._rows):
            if mine.token_ids is row.token_ids and mine.sampling is row.sampling:
                length = int(self._lengths[index])
                found = self._ids[index, :length].cpu().numpy(), self._counts[index, :length].cpu().numpy()
                return _with_new(*found, row.token_ids[self._num_counted[index] :])
        return None

    def _fill(self, known: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None]) -> None:
        tables = [
            _count(row) if table is None else table for row, table in zip(self._rows, known, strict=True)
        ]
        lengths = [len(ids) for ids, _ in tables]
        self._room = max(lengths) + SPARE_PLACES
        self._longest = max(lengths)  # at most so long; exact when made
        ids = np.empty((len(tables), self._room), dtype=np.int64)
        counts = np.empty((len(tables), self._room), dtype=np.float32)
        for place, (own_ids, own_counts) in enumerate(tables):
            ids[place, : len(own_ids)], ids[place, len(own_ids) :] = own_ids, own_ids[0]
            counts[place, : len(own_ids)], counts[place, len(own_ids) :] = own_counts, own_counts[0]
        self._ids, self._counts = to_device(ids, self._device), to_device(counts, self._device)
        self._lengths = to_device(np.array(lengths, dtype=np.int64), self._device)

    def follow(self) -> None:
        """Count what the rows' arrays have got since the last time: mostly one token each."""
        lengths = [len(row.token_ids) for row in self._rows]
        grown = {now - before for now, before in zip(lengths, self._num_counted, strict=True)}
        if grown == {0}:
            return
        if grown == {1} and self._longest < self._room:
            newest = np.array([row.token_ids[-1] for row in self._rows], dtype=np.int64)
            self._add(to_device(newest, self._device)[:, None])
        else:
            self._fill([self.counted(row) for row in self._rows])
        self._num_counted = lengths

    def _add(self, tokens: torch.Tensor) -> None:
        """One more token per row, (rows, 1): counted where it is, else put at the row's end."""
        is_here = self._ids == tokens
        self._counts += is_here
        is_new = ~is_here.any(dim=1, keepdim=True)
        end = self._lengths[:, None]
        self._ids.scatter_(1, end, torch.where(is_new, tokens, self._ids.gather(1, end)))
        self._counts.scatter_(1, end, torch.where(is_new, 1.0, self._counts.gather(1, end)))
        self._lengths += is_new[:, 0]
        self._longest += 1

    def apply_(self, logits: torch.Tensor) -> None:
        """Change the rows' logits where they stand. logits: (rows, vocabulary) float32, contiguous."""
        flat, places = logits.view(-1), self._row_starts + self._ids
        values = flat.take(places)
        values = torch.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._frequency * self._counts
        values -= self._presence * (self._counts > 0)
        flat[places] = values


def _count(row: PenalisedRow) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Distinct tokens and how often the output has each; never none, since a prompt has a last token."""
    first = 0 if row.sampling.repetition_penalty != 1 else row.num_prompt_tokens - 1
    tokens = np.array(row.token_ids[first:], dtype=np.int64)
    ids, places = np.unique(tokens, return_inverse=True)
    output = places[row.num_prompt_tokens - first :]
    return ids, np.bincount(output, minlength=len(ids)).astype(np.float32)


def _with_new(
    ids: npt.NDArray[np.int64], counts: npt.NDArray[np.float32], tokens: array[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """A table with more of the output counted in."""
    if not tokens:
        return ids, counts
    both = np.concatenate([ids, np.array(tokens, dtype=np.int64)])
    weights = np.concatenate([counts, np.ones(len(tokens), dtype=np.float32)])
    distinct, places = np.unique(both, return_inverse=True)
    return distinct, np.bincount(places, weights=weights, minlength=len(distinct)).astype(np.float32)
