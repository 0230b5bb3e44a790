"""From logits to tokens. The draw at (seed, position) is a pure function of the row's logits.

Knows logits and sampling parameters; knows neither text nor stopping. Vectorised over the batch. What a
`Sampler` keeps from step to step is work saved, never state: parameters as tensors for as long as the batch
has the same members, and the counts of penalised tokens, which the token ids alone would give as well.

    logits --> log probabilities                                        the model's own, before everything
           --> bias, penalties, tokens held back, mask                  which also move a greedy maximum
           --> temperature --> min-p, top-k, top-p --> noise --> token  or the largest, for greedy rows

The draw is the Gumbel-max trick: the token with the largest `logit / temperature + noise(seed,
position, token)` has exactly the softmax's distribution. Compared with inverting a cumulative sum, it
needs no sorted order and no total, so the last-bit differences that another batch shape makes in the
logits change the drawn token only where two scores agree to those very bits: with a cumulative sum
every one of the vocabulary's boundaries could tip, and a swap of two equal probabilities would move them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cache.messages import Logprobs, SamplingParams
from replica.errors import InvalidLogits
from replica.output.filters import Filters
from replica.output.logprobs import token_logprobs
from replica.output.noise import draw_keys, gumbel_noise, seed_keys
from replica.output.penalties import PenalisedRow, PenaltyTable
from replica.transfer import ToHost, to_device

GREEDY_TEMPERATURE = 1e-5  # below this a softmax is a maximum in float32

# Rows are drawn in slices of about this many logits: bounds the noise's memory (16 MiB per tensor).
MAX_SLICE_ELEMENTS = 1 << 22

# The largest logit is looked for in chunks of this many: vocabularies are mostly multiples of it.
ARGMAX_CHUNK = 64
FEWEST_CHUNKED = 1 << 15  # of fewer logits the place is found before two stages have begun

_NO_MASKS: Mapping[int, torch.Tensor] = {}


@dataclass(frozen=True, slots=True)
class DrawRow:
    """One row of logits: whose it is and which draw this is."""

    sampling: SamplingParams
    seed: int
    position: int  # index the drawn token will have in the sequence
    num_output_tokens: int  # drawn before this one
    # All before this one. The same object in every step of a request: penalties know their row by it.
    token_ids: array[int] | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """What came of a batch of rows."""

    tokens: list[int | None]  # one per row; None where nothing was to be drawn
    logprobs: dict[int, Logprobs]  # by row, where they were asked for


class Drawing:
    """A batch of rows whose tokens the device is drawing."""

    def __init__(self, tokens: torch.Tensor, take: Callable[[], Drawn]) -> None:
        self.tokens = tokens  # (rows,) int64, on the device; anything where a row draws nothing
        self.take = take  # blocks until it is done; raises InvalidLogits for NaN

    @classmethod
    def done(cls, drawn: Drawn, device: torch.device) -> Drawing:
        """Of rows that are drawn already."""
        tokens = torch.tensor([token or 0 for token in drawn.tokens], dtype=torch.int64, device=device)
        return cls(tokens, lambda: drawn)


class Sampler:
    """Draws for one runner. One thread at a time."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._plan: _Plan | None = None

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[DrawRow | None],
        *,
        masks: Mapping[int, torch.Tensor] = _NO_MASKS,
    ) -> Drawn:
        """`begin`, and what comes of it. Blocks until the device has finished."""
        return self.begin(logits, rows, masks=masks).take()

    def begin(
        self,
        logits: torch.Tensor,
        rows: Sequence[DrawRow | None],
        *,
        masks: Mapping[int, torch.Tensor] = _NO_MASKS,
    ) -> Drawing:
        """One token per row. logits: (rows, vocabulary), any float type; not changed.

        A row that is None draws nothing and is only checked: the chunk it ends is about to be cached.
        masks: by row, the only tokens it may draw, as bits: ((vocabulary + 31) // 32,) int32, lowest first.
        logits must stay as they are until the tokens are taken where somebody asks for log probabilities.
        Waits for a card only where rows with penalties join others or leave them, or outgrow their table.
        """
        assert logits.shape[0] == len(rows)
        if not rows:
            return Drawing.done(Drawn([], {}), logits.device)
        plan = self._planned(rows, logits)
        own, logits = logits, plan.shaped(logits, masks)
        best, tokens = _largest(logits)  # the maximum also carries NaN, so it is checked without another pass
        tokens = plan.drawn(logits, tokens, rows)
        # One transfer for both, asked for before the device is given anything else.
        results = ToHost(torch.stack([tokens, torch.isnan(best).to(tokens.dtype)]))

        def take() -> Drawn:
            found, is_invalid = results.take().tolist()
            if any(is_invalid):
                raise InvalidLogits([row for row, is_nan in enumerate(is_invalid) if is_nan])
            drawn = [None if row is None else token for row, token in zip(rows, found, strict=True)]
            return Drawn(drawn, plan.logprobs(own, tokens))

        return Drawing(tokens, take)

    def _planned(self, rows: Sequence[DrawRow | None], logits: torch.Tensor) -> _Plan:
        """The last step's plan where it has the same rows to draw in the same way; else one of its own."""
        members = [None if row is None else _member(row) for row in rows]
        plan = self._plan
        if plan is None or plan.members != members or plan.vocabulary != logits.shape[1]:
            plan = _Plan(members, rows, logits, self._eos_token_ids, earlier=plan)
            self._plan = plan
        return plan


def takes_largest(row: DrawRow, eos_token_ids: frozenset[int]) -> bool:
    """Whether the row's token is simply the one with the largest logit, so that no other logit matters."""
    sampling = row.sampling
    return (
        sampling.temperature < GREEDY_TEMPERATURE
        and sampling.logprobs is None
        and not sampling.logit_bias
        and not sampling.is_penalised
        and not _held_back(row, eos_token_ids)
    )


# What a row's place in a plan rests on: its parameters, its seed, its tokens, each the same object; and
# whether stopping is still to be held back. A plan holds what is named here, so no id is given out twice.
_Member = tuple[int, int, int, bool]


def _member(row: DrawRow) -> _Member:
    sampling = row.sampling
    return id(sampling), row.seed, id(row.token_ids), row.num_output_tokens < sampling.min_tokens


class _Plan:
    """How one batch of rows is drawn, as tensors: all that does not change from step to step."""

    def __init__(
        self,
        members: list[_Member | None],
        rows: Sequence[DrawRow | None],
        logits: torch.Tensor,
        eos_token_ids: frozenset[int],
        earlier: _Plan | None,
    ) -> None:
        self.members = members
        self.vocabulary = logits.shape[1]
        self._rows = list(rows)  # holds what `members` names
        self._device = logits.device
        present = [(index, row) for index, row in enumerate(rows) if row is not None]
        self._bias = self._biases(present)
        self._stops = self._early_stops(present, eos_token_ids)
        self._penalties = self._penalty_table(present, earlier)
        drawing = [(i, row) for i, row in present if row.sampling.temperature >= GREEDY_TEMPERATURE]
        self._drawing = [index for index, _ in drawing]
        if drawing:
            sampling = [row.sampling for _, row in drawing]
            self._draw_index = self._tensor(self._drawing, torch.int64)
            self._temperatures = self._tensor([each.temperature for each in sampling], torch.float32)[:, None]
            self._filters = Filters.of(sampling, self.vocabulary, self._device)
            self._seeds = seed_keys(row.seed for _, row in drawing)
        asking = [(i, row.sampling.logprobs) for i, row in present if row.sampling.logprobs is not None]
        self._asking = [index for index, _ in asking]
        self._num_top = [num_top for _, num_top in asking if num_top is not None]
        self._asking_index = self._tensor(self._asking, torch.int64) if asking else None

    # -- in every step ------------------------------------------------------------------------------

    def shaped(self, logits: torch.Tensor, masks: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Logits with all that moves them before a draw; the same tensor where nothing does."""
        if self._bias is None and self._stops is None and self._penalties is None and not masks:
            return logits
        shaped = logits.float()
        if shaped is logits:
            shaped = logits.clone()
        shaped = shaped.contiguous()
        flat = shaped.view(-1)
        if self._bias is not None:
            places, values = self._bias
            flat[places] += values
        if self._penalties is not None:
            self._penalties.follow()
            self._penalties.apply_(shaped)
        if self._stops is not None:
            flat[self._stops] = float("-inf")
        if masks:
            self._mask_(shaped, masks)
        return shaped

    def _mask_(self, logits: torch.Tensor, masks: Mapping[int, torch.Tensor]) -> None:
        """Take out what the masks do not allow: one transfer and one pass for all of them."""
        packed = to_device(torch.stack(list(masks.values())).numpy(), self._device)
        forbidden = _unpacked(packed, self.vocabulary).logical_not_()
        rows = self._tensor(list(masks), torch.int64)
        logits[rows] = logits[rows].masked_fill_(forbidden, float("-inf"))

    def drawn(
        self, logits: torch.Tensor, largest: torch.Tensor, rows: Sequence[DrawRow | None]
    ) -> torch.Tensor:
        """Each row's token: drawn where the temperature says so, else its largest; (rows,) int64."""
        if not self._drawing:
            return largest
        positions = [row.position for row in (rows[index] for index in self._drawing) if row is not None]
        keys = draw_keys(self._seeds, np.array(positions, dtype=np.int64))
        chosen = logits if len(self._drawing) == len(rows) else logits[self._draw_index]
        size, count = max(1, MAX_SLICE_ELEMENTS // self.vocabulary), len(self._drawing)
        parts = [
            self._draw(chosen[part], keys[part], part)
            for part in (slice(at, at + size) for at in range(0, count, size))
        ]
        return largest.index_copy(0, self._draw_index, parts[0] if len(parts) == 1 else torch.cat(parts))

    def _draw(self, logits: torch.Tensor, keys: torch.Tensor, part: slice) -> torch.Tensor:
        scores = self._filters.rows(part).apply(logits.float() / self._temperatures[part])
        return (scores + gumbel_noise(keys, self.vocabulary, self._device)).argmax(dim=-1)

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> dict[int, Logprobs]:
        """By row. logits: as the model gave them. tokens: (rows,)."""
        if self._asking_index is None:
            return {}
        those = logits if len(self._asking) == len(logits) else logits[self._asking_index]
        found = token_logprobs(those, tokens[self._asking_index], self._num_top)
        return dict(zip(self._asking, found, strict=True))

    # -- when it is made ----------------------------------------------------------------------------

    def _biases(self, rows: Sequence[tuple[int, DrawRow]]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Places in the flattened logits, and what is added there."""
        biased = [
            (index * self.vocabulary + token_id, bias)
            for index, row in rows
            for token_id, bias in row.sampling.logit_bias
            if 0 <= token_id < self.vocabulary
        ]
        if not biased:
            return None
        places, values = zip(*biased, strict=True)
        return self._tensor(places, torch.int64), self._tensor(values, torch.float32)

    def _early_stops(
        self, rows: Sequence[tuple[int, DrawRow]], eos_token_ids: frozenset[int]
    ) -> torch.Tensor | None:
        """Places in the flattened logits of what rows below their `min_tokens` must not draw."""
        places = [
            index * self.vocabulary + token_id
            for index, row in rows
            for token_id in sorted(_held_back(row, eos_token_ids))
            if 0 <= token_id < self.vocabulary
        ]
        return self._tensor(places, torch.int64) if places else None

    def _penalty_table(
        self, rows: Sequence[tuple[int, DrawRow]], earlier: _Plan | None
    ) -> PenaltyTable | None:
        penalised = []
        for index, row in rows:
            if row.sampling.is_penalised:
                assert row.token_ids, "penalties are over tokens, and none were given"
                num_prompt_tokens = row.position - row.num_output_tokens
                penalised.append(PenalisedRow(index, row.sampling, row.token_ids, num_prompt_tokens))
        if not penalised:
            return None
        before = earlier._penalties if earlier is not None else None
        return PenaltyTable(penalised, self.vocabulary, self._device, before)

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        # A plan is made while the card computes the step before: it must not be waited for.
        return to_device(torch.tensor(values, dtype=dtype).numpy(), self._device)


def _held_back(row: DrawRow, eos: frozenset[int]) -> set[int]:
    """Tokens that the row must not draw yet.

    `ignore_eos` only means that end-of-sequence does not stop: it may then be drawn at any time.
    """
    if row.num_output_tokens >= row.sampling.min_tokens:
        return set()
    return set(row.sampling.stop_token_ids) | (frozenset() if row.sampling.ignore_eos else eos)


def _unpacked(masks: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Packed masks' bits, (rows, vocabulary) bool. masks: (rows, words) int32, lowest bit first."""
    bits = 2 ** torch.arange(8, dtype=torch.uint8, device=masks.device)
    return ((masks.view(torch.uint8)[..., None] & bits) != 0).flatten(-2)[..., :vocabulary]


def _largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest logit and its token, the first one among equals; NaN is larger than anything.

    In two stages, because torch's CPU kernels find a maximum many times as fast as they find its place
    (32 x 32,000 float32: 45 and 842 us): the place is looked for only within one chunk.
    """
    num_rows, vocabulary = logits.shape
    if vocabulary % ARGMAX_CHUNK or logits.numel() < FEWEST_CHUNKED:
        best, tokens = logits.max(dim=-1)
        return best, tokens
    chunks = logits.view(num_rows, -1, ARGMAX_CHUNK)
    chunk = chunks.amax(dim=-1).argmax(dim=-1, keepdim=True)
    best, place = chunks.take_along_dim(chunk[..., None], dim=1).squeeze(1).max(dim=-1)
    return best, chunk.squeeze(1) * ARGMAX_CHUNK + place
