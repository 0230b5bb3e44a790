"""The largest logit without the float32 product: a coarse one finds who could be it, exact sums decide.

A linear layer's product in fewer bits (`coarse_product.py`) reads half or a quarter of the bytes, and takes
half or a third of the time. Its logits are wrong by a bounded amount, so a few tokens a row can be the
largest one; only those are computed exactly. Nothing here is an approximation: what the bound cannot exclude
is computed, and a row with too much of that is handed back.

The bound. For a row x and a token's weights w and bias b (n numbers each), x', w', b' what is left of them
in the coarse product, and a the logit that came out:

    x.w + b - (x'.w' + b')  =  x.(w - w') + (x - x').w' + (b - b')
    by Cauchy and Schwarz  <=  |x| |w - w'|  +  |x - x'| |w'|  +  |b - b'|      (1) rounding of what goes in
    the sum in float32     <=  g (|x'| |w'| + |b'|),  g = (n + 2) 2^-23         (2) in any order
    the result in bfloat16 <=  2^-8 |sum|  <=  (2^-8 + 2^-15) |a|               (3) rounding of what comes out

(1) takes the rounding errors as they are (|w - w'| when the weights are packed, |x - x'| in every step), not
as they could be at worst: 2.4 times tighter on ordinary numbers, and nothing at all of |w - w'| for a
checkpoint that was stored in bfloat16, in a bfloat16 product. (2) holds for adders that truncate, too, and is
taken twice, so that the bound also holds against what a float32 product would have said: the token it finds
largest is among ours. An int8 product sums exactly; in place of the first (2) it has three roundings to
float32, of x', of w' and of their sum, which are less. Numbers too small for a normal float32, and squares
that become so, may count as zero in the instructions and in the norms; `_TINY` stands for them. Everything is
widened by several times 2^-10, more than float32 loses in computing norms and bound themselves.

Who could be it. The token with the largest coarse logit is computed exactly first: then only those can be
larger that reach as high with their whole error. Without that, the largest coarse logit would have to be
taken as low as its own error allows, and three times as many would come near it.

Knows weights and rows; knows neither models nor requests.
Sources: N. J. Higham, Accuracy and Stability of Numerical Algorithms, section 3.1, for (2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replica.layers.coarse_product import CoarseLogits, MakeProduct

# Tokens that share one bound and one maximum; more are fewer bounds, but then more tokens to look at again.
CHUNK = 64

# Tokens computed exactly in one call, over all rows, at most this share of the vocabulary: the weights of
# scattered tokens are read about this many times slower than a product reads them in a row.
EXACT_SHARE = 16
FEWEST_EXACT = 8  # a row's, whatever the share: two contenders are the rule in bfloat16, ten in int8

# Norms whose product could leave float32's range are not bounded at all.
_LARGEST_PRODUCT = 1e37

_OUTPUT_ROUNDING = 2.0**-8 + 2.0**-15
# What is screened out stays this far (relatively) below what is not, so that what a model does to its logits
# afterwards does not make equals of them.
_DISTANCE = 2.0**-10
_WIDENING = 1.0 + 2.0**-10
_TINY = 2.0**-62  # whose square is no longer a normal float32, four times over
_SLICE = 1 << 18  # weights looked at at once: as much as stays in a core's cache


@dataclass(frozen=True, slots=True)
class Contenders:
    """Tokens that may have the largest logit of their row, by row and then by token; int64 each.

    limits: (rows,) float32; every other token's logit is below, whether exact or from a float32 product.
    counts: per row, how many; 0 = too many to tell, or not to be bounded.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    limits: torch.Tensor
    counts: list[int]


class GreedyScreen:
    """A linear layer's weight in a coarse product, with what is lost in it. Float32 on CPU."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, make_product: MakeProduct) -> None:
        """weight: (tokens, width) float32, contiguous; held for the exact sums, as long as this lives.

        A weight stored in less than float32 and widened, as most checkpoints are, may be given as it was
        (see `narrowed`). Raises ValueError for weights that are not numbers, or too large to be bounded, and
        what `make_product` raises.
        """
        self.num_tokens, self.width = weight.shape
        self._weight = weight.detach()
        self._bias = None if bias is None else bias.detach().float()
        padded_bias = None if self._bias is None else _filled_up(self._bias)
        self._product = make_product(_filled_up(self._weight), padded_bias)
        self._summing = 2 * (self.width + 2) * 2.0**-23  # (2), taken twice
        bounds = self._bounds_of_chunks()
        self._largest_norm = float(bounds[1].max())
        if not self._largest_norm < _LARGEST_PRODUCT or not bool(torch.isfinite(bounds).all()):
            raise ValueError("weights that are not numbers, or too large to be bounded")
        self._bounds = bounds

    def can_bound(self, rows: torch.Tensor) -> torch.Tensor:
        """Which rows' logits are bounded, so numbers: (rows,) bool. False for NaN, infinite or huge ones."""
        bounded: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1) * self._largest_norm < _LARGEST_PRODUCT
        return bounded

    def contenders(self, rows: torch.Tensor) -> Contenders:
        """Who may have the largest logit. rows: (rows, width) float32, at least one."""
        count = rows.shape[0]
        most = max(FEWEST_EXACT, self.num_tokens // (EXACT_SHARE * count))
        coarse = self._product(rows)
        values = coarse.values.view(count, -1, CHUNK)
        peaks = _in_units(largest_of_chunks(values), coarse.units)
        errors = self._errors(rows, coarse)
        limits = self._limits(rows, self._leaders(values, peaks))
        is_near = peaks + errors + _OUTPUT_ROUNDING * peaks.abs() >= limits[:, None]
        places = is_near.nonzero()
        if places.shape[0] > most * count:  # at least a token each: whose are too many is known already
            places = (is_near & (is_near.sum(dim=-1) <= most)[:, None]).nonzero()
        of_row, chunk = places[:, 0], places[:, 1]
        units = None if coarse.units is None else coarse.units[of_row]
        near = _in_units(values[of_row, chunk].float(), units)
        highest = near + _OUTPUT_ROUNDING * near.abs() + errors[of_row, chunk][:, None]
        inside = (highest >= limits[of_row][:, None]).nonzero()
        of_row, tokens = of_row[inside[:, 0]], chunk[inside[:, 0]] * CHUNK + inside[:, 1]
        keep = tokens < self.num_tokens  # not the copies that fill up the last chunk
        counts = torch.bincount(of_row[keep], minlength=count)
        counts.masked_fill_((counts > most) | ~torch.isfinite(limits), 0)
        keep &= counts[of_row] > 0
        return Contenders(of_row[keep], tokens[keep], limits, counts.tolist())

    def exact(self, rows: torch.Tensor, contenders: Contenders) -> torch.Tensor:
        """The contenders' logits, summed in float64 and rounded once to float32."""
        logits: torch.Tensor = self._sums(rows.index_select(0, contenders.rows), contenders.tokens).float()
        return logits

    def _sums(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of a token for each row, float64.

        Equal weights give equal bits: every sum runs over its own contiguous products in one order.
        """
        weights = self._weight.index_select(0, tokens).double()
        logits = weights.mul_(rows).sum(dim=-1)
        if self._bias is not None:
            logits += self._bias.index_select(0, tokens)
        return logits

    def _leaders(self, values: torch.Tensor, peaks: torch.Tensor) -> torch.Tensor:
        """Each row's token with the largest coarse logit, (rows,); any token in rows that are not numbers."""
        chunk = peaks.argmax(dim=-1)
        inside = values[torch.arange(chunk.shape[0]), chunk].float().argmax(dim=-1)
        tokens: torch.Tensor = chunk * CHUNK + inside
        return tokens.clamp_(max=self.num_tokens - 1)  # copies that fill up the last chunk are of the last

    def _limits(self, rows: torch.Tensor, leaders: torch.Tensor) -> torch.Tensor:
        """What a logit must reach to be the largest, (rows,); -inf in rows that cannot be bounded.

        A little less than the leader's, which a float32 product may find smaller than it is by (2).
        """
        logits = self._sums(rows, leaders).float()
        norms = torch.linalg.vector_norm(rows, dim=-1)
        slack = (norms + self.width**0.5 * _TINY) * (self._summing * _WIDENING * self._largest_norm)
        slack += _DISTANCE * logits.abs()
        if self._bias is not None:
            slack += self._summing * self._bias.abs().amax()
        bounded = norms * self._largest_norm < _LARGEST_PRODUCT
        limits: torch.Tensor = logits - slack - self.width * _TINY**2
        return limits.masked_fill_(~bounded, -float("inf"))

    def _errors(self, rows: torch.Tensor, coarse: CoarseLogits) -> torch.Tensor:
        """Terms (1) and (2), (rows, chunks); infinite for a row that cannot be bounded."""
        norms = torch.linalg.vector_norm(rows, dim=-1)
        lost = torch.linalg.vector_norm(rows - coarse.rows, dim=-1)
        tiny = self.width**0.5 * _TINY
        of_rows = torch.stack([norms + tiny, lost + tiny, torch.ones_like(norms)], dim=-1)
        errors = (of_rows @ self._bounds).mul_(_WIDENING * _WIDENING)  # norms, and this product
        bounded = norms * self._largest_norm < _LARGEST_PRODUCT  # not for NaN either
        return errors.masked_fill_(~bounded[:, None], float("inf"))

    def _bounds_of_chunks(self) -> torch.Tensor:
        """Per chunk what |x|, |x - x'| and 1 are multiplied by, (3, chunks) float32."""
        norms, lost = [], []
        for part in map(torch.Tensor.float, _slices(self._weight)):
            left = self._product.rounded(part)
            lost.append(torch.linalg.vector_norm(part - left, dim=-1))
            of_both = [torch.linalg.vector_norm(each, dim=-1) for each in (part, left)]
            norms.append(torch.maximum(*of_both))
        tiny = self.width**0.5 * _TINY
        # The norms' own rounding is a widening's worth; the last one covers what the bound is computed with.
        norm, loss = torch.cat(norms) * _WIDENING + tiny, torch.cat(lost) * _WIDENING + tiny
        constant = torch.full_like(norm, self.width * _TINY**2)
        if self._bias is not None:
            left = self._bias.to(torch.bfloat16).float()
            largest = torch.maximum(self._bias.abs(), left.abs())
            constant += (self._bias - left).abs() + self._summing * largest
        # |x'| is at most 1.01 |x| in bfloat16; in int8 more, of far fewer roundings.
        by_token = _filled_up(torch.stack([loss + 1.02 * self._summing * norm, norm, constant], dim=1))
        return by_token.T.reshape(3, -1, CHUNK).amax(dim=-1)


def _in_units(logits: torch.Tensor, units: torch.Tensor | None) -> torch.Tensor:
    return logits if units is None else logits * units


def largest_of_chunks(values: torch.Tensor) -> torch.Tensor:
    """The largest of the last dimension, float32; of (rows, chunks, n) bfloat16 numbers that are no NaN.

    Positive ones are in the order of the integers that their bits are, and the largest integer is found in
    a third of the time, without a float32 copy of everything. Negative ones are in the opposite order.
    """
    largest = values.view(torch.int16).amax(dim=-1)
    peaks = largest.view(torch.bfloat16).float()
    of_row, chunk = (largest <= 0).nonzero(as_tuple=True)
    if 2 * of_row.numel() > largest.numel():
        return values.float().amax(dim=-1)
    if of_row.numel():
        peaks[of_row, chunk] = values[of_row, chunk].float().amax(dim=-1)
    return peaks


def narrowed(weight: torch.Tensor) -> torch.Tensor:
    """The weight in half the bytes where that loses nothing, as for a checkpoint stored so; else itself."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(part.to(dtype).to(part.dtype), part) for part in _slices(weight)):
            return weight.to(dtype)
    return weight


def _slices(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parts: tuple[torch.Tensor, ...] = torch.split(weight, max(1, _SLICE // weight.shape[1]))
    return parts


def _filled_up(values: torch.Tensor) -> torch.Tensor:
    """To a whole number of chunks, with copies of the last token: whatever they say is true of a token."""
    lacking = -values.shape[0] % CHUNK
    return torch.cat([values, values[-1:].expand(lacking, *values.shape[1:])]) if lacking else values
