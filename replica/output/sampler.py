"""From logits to tokens. The draw at (seed, position) is a pure function of the row's logits.

Knows logits and sampling parameters; knows neither text nor stopping. Vectorised over the batch;
no generator, no state: the randomness of token `t` is a hash of (seed, position, t).

The draw is the Gumbel-max trick: the token with the largest `logit / temperature + noise(seed,
position, token)` has exactly the softmax's distribution. Compared with inverting a cumulative sum, it
needs no sorted order and no total, so the last-bit differences that another batch shape makes in the
logits change the drawn token only where two scores agree to those very bits: with a cumulative sum
every one of the vocabulary's boundaries could tip, and a swap of two equal probabilities would move them.
A filter (top-k, top-p) keeps a *set*, given as a threshold on logits, for the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cache.messages import SamplingParams

GREEDY_TEMPERATURE = 1e-5  # below this a softmax is a maximum in float32

# Rows are drawn in slices of about this many logits: bounds the noise's memory (16 MiB per tensor).
MAX_SLICE_ELEMENTS = 1 << 22

# The largest logit is looked for in chunks of this many: vocabularies are mostly multiples of it.
ARGMAX_CHUNK = 64
FEWEST_CHUNKED = 1 << 15  # of fewer logits the place is found before two stages have begun

# top-p looks at this many of the largest logits first; only flat distributions need the full sort.
NUCLEUS_CANDIDATES = 1024

_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class DrawRow:
    """One row of logits: whose it is and which draw this is."""

    sampling: SamplingParams
    seed: int
    position: int  # index the drawn token will have in the sequence
    num_output_tokens: int  # drawn before this one


class InvalidLogits(RuntimeError):
    """The model returned NaN: the step's requests fail instead of answering noise."""


def sample(
    logits: torch.Tensor, rows: Sequence[DrawRow | None], eos_token_ids: frozenset[int]
) -> list[int | None]:
    """One token per row. logits: (rows, vocabulary), any float type; not changed.

    A row that is None draws nothing and is only checked: the prompt's chunk it ends is about to be cached.
    Raises InvalidLogits for NaN. Blocks until the device has finished.
    """
    assert logits.shape[0] == len(rows)
    if not rows:
        return []
    logits = _without_early_stops(logits, rows, eos_token_ids)
    places = [i for i, row in enumerate(rows) if row and row.sampling.temperature >= GREEDY_TEMPERATURE]
    best, tokens = _largest(logits)  # the maximum also carries NaN, so it is checked without another pass
    if places:
        index = torch.tensor(places, device=logits.device)
        drawing = [row for row in (rows[i] for i in places) if row is not None]
        tokens = tokens.index_copy(0, index, _draw(logits[index], drawing))
    results = torch.stack([tokens, torch.isnan(best).to(tokens.dtype)]).tolist()  # one transfer for both
    if any(results[1]):
        raise InvalidLogits(f"NaN in the logits of {sum(results[1])} of {len(rows)} sequences")
    return [None if row is None else int(token) for row, token in zip(rows, results[0], strict=True)]


def takes_largest(row: DrawRow, eos_token_ids: frozenset[int]) -> bool:
    """Whether the row's token is simply the one with the largest logit, so that no other logit matters."""
    return row.sampling.temperature < GREEDY_TEMPERATURE and not _held_back(row, eos_token_ids)


def _held_back(row: DrawRow, eos: frozenset[int]) -> set[int]:
    """Tokens that the row must not draw yet.

    `ignore_eos` only means that end-of-sequence does not stop: it may then be drawn at any time.
    """
    if row.num_output_tokens >= row.sampling.min_tokens:
        return set()
    return set(row.sampling.stop_token_ids) | (frozenset() if row.sampling.ignore_eos else eos)


def _without_early_stops(
    logits: torch.Tensor, rows: Sequence[DrawRow | None], eos: frozenset[int]
) -> torch.Tensor:
    """Rows below their `min_tokens` cannot draw what would stop them."""
    row_index: list[int] = []
    token_ids: list[int] = []
    for index, row in enumerate(rows):
        if row is None:
            continue
        stops = {token for token in _held_back(row, eos) if 0 <= token < logits.shape[1]}
        row_index += [index] * len(stops)
        token_ids += sorted(stops)
    if not row_index:
        return logits
    places = (
        torch.tensor(row_index, device=logits.device),
        torch.tensor(token_ids, device=logits.device),
    )
    return logits.index_put(places, torch.tensor(float("-inf"), dtype=logits.dtype, device=logits.device))


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


def _draw(logits: torch.Tensor, rows: Sequence[DrawRow]) -> torch.Tensor:
    """Sampled tokens, (rows,) int64."""
    size = max(1, MAX_SLICE_ELEMENTS // logits.shape[1])
    parts = [_draw_slice(logits[at : at + size], rows[at : at + size]) for at in range(0, len(rows), size)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _draw_slice(logits: torch.Tensor, rows: Sequence[DrawRow]) -> torch.Tensor:
    device = logits.device
    temperatures = torch.tensor(
        [row.sampling.temperature for row in rows], dtype=torch.float32, device=device
    )
    scores = logits.float() / temperatures[:, None]
    scores = _keep_top_k(scores, [row.sampling.top_k for row in rows])
    scores = _keep_top_p(scores, [row.sampling.top_p for row in rows])
    keys = [_draw_key(row.seed, row.position) for row in rows]
    return (scores + gumbel_noise(keys, scores.shape[1], device)).argmax(dim=-1)


# -- filters: each keeps the tokens at or above a row's threshold; ties at the threshold all stay ----


def _keep_top_k(scores: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    """Keep each row's `top_k` largest (0 = all)."""
    vocabulary = scores.shape[1]
    limits = [k if 0 < k < vocabulary else vocabulary for k in top_k]
    if min(limits) == vocabulary:
        return scores
    widest = max(k for k in limits if k < vocabulary)
    largest = scores.topk(widest, dim=-1).values
    rank = torch.tensor([min(k, widest) - 1 for k in limits], device=scores.device)
    thresholds = largest.gather(1, rank[:, None])
    unlimited = torch.tensor([k == vocabulary for k in limits], device=scores.device)[:, None]
    return scores.masked_fill((scores < thresholds) & ~unlimited, float("-inf"))


def _keep_top_p(scores: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    """Keep each row's smallest set of most probable tokens whose probabilities reach `top_p`."""
    if min(top_p) >= 1.0:
        return scores
    wanted = torch.tensor(top_p, dtype=torch.float32, device=scores.device)[:, None]
    total = scores.logsumexp(dim=-1, keepdim=True)
    count = min(NUCLEUS_CANDIDATES, scores.shape[1])
    largest = scores.topk(count, dim=-1).values
    mass = (largest - total).exp().cumsum(dim=-1)
    if count < scores.shape[1] and bool(((mass[:, -1:] < wanted) & (wanted < 1.0)).any()):
        largest = scores.sort(dim=-1, descending=True).values
        mass = (largest - total).exp().cumsum(dim=-1)
    # The last token kept is the first at which the mass reaches the wanted one.
    last = (mass < wanted).sum(dim=-1, keepdim=True).clamp(max=mass.shape[1] - 1)
    thresholds = largest.gather(1, last)
    return scores.masked_fill((scores < thresholds) & (wanted < 1.0), float("-inf"))


# -- noise ------------------------------------------------------------------------------------------


def gumbel_noise(keys: Sequence[tuple[int, int]], vocabulary: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise, (rows, vocabulary) float32: a pure function of (row's key, token id).

    A 32-bit integer hash of the token id, keyed before and between its rounds; the same integers on
    every device, whatever the batch.
    """
    first = torch.tensor([key[0] for key in keys], dtype=torch.int32, device=device)[:, None]
    second = torch.tensor([key[1] for key in keys], dtype=torch.int32, device=device)[:, None]
    bits = torch.arange(vocabulary, dtype=torch.int32, device=device)[None] * _signed(0x9E3779B9) ^ first
    _mix(bits, 16, 0x7FEB352D)
    _mix(bits, 15, 0x846CA68B)
    bits.bitwise_xor_(second)
    _mix(bits, 16, 0x21F0AAAD)
    _mix(bits, 15, 0x735A2D97)
    bits.bitwise_xor_(_shifted(bits, 15)).bitwise_and_(0x7FFFFFFF)
    # The winner is the smallest exponential: taken from numbers near 0, where float32 is finest.
    uniform = bits.float().add_(0.5).mul_(2.0**-31)  # (0, 1]; 1 gives an infinite wait, which never wins
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(bits: torch.Tensor, shift: int, factor: int) -> None:
    bits.bitwise_xor_(_shifted(bits, shift)).mul_(_signed(factor))


def _shifted(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """Logical right shift of int32 (torch's is arithmetic)."""
    return (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _draw_key(seed: int, position: int) -> tuple[int, int]:
    """64 well-mixed bits of (seed, position) as two int32 (splitmix64's finalizer, twice)."""
    mixed = _splitmix(_splitmix(seed & _MASK_64) ^ (position & _MASK_64))
    return _signed(mixed & 0xFFFFFFFF), _signed(mixed >> 32)


def _splitmix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)
