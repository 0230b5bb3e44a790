"""The largest logit without the float32 product: bfloat16 finds who could be it, exact sums decide.

A linear layer's product with its weight and its rows rounded to bfloat16 reads half the bytes and, where the
processor has the instructions, takes half the time. Its logits are wrong by a bounded amount, so a few
tokens a row can be the largest one; only those are computed exactly. Nothing here is an approximation:
what the bound cannot exclude is computed, and a row with too much of that is handed back.

The bound. For a row x and a token's weights w and bias b (n numbers each), x', w', b' what is left of them
in bfloat16, and a the logit that came out:

    x.w + b - (x'.w' + b')  =  x.(w - w') + (x - x').w' + (b - b')
    by Cauchy and Schwarz  <=  |x| |w - w'|  +  |x - x'| |w'|  +  |b - b'|      (1) rounding of what goes in
    the sum in float32     <=  g (|x'| |w'| + |b'|),  g = (n + 2) 2^-23         (2) in any order
    the result in bfloat16 <=  2^-8 |sum|  <=  (2^-8 + 2^-15) |a|               (3) rounding of what comes out

(1) takes the rounding errors as they are (|w - w'| when the weights are packed, |x - x'| in every step), not
as they could be at worst: 2.4 times tighter on ordinary numbers, and nothing at all of |w - w'| for a
checkpoint that was stored in bfloat16. (2) holds for adders that truncate, too, and is taken twice, so that
the bound also holds against what a float32 product would have said: the token it finds largest is among
ours. Numbers too small for a normal float32, and squares that become so, may count as zero in the
instructions and in the norms; `_TINY` stands for them. Everything is widened by several times 2^-10, more
than float32 loses in computing norms and bound themselves.

Knows weights and rows; knows neither models nor requests.
Sources: N. J. Higham, Accuracy and Stability of Numerical Algorithms, section 3.1, for (2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replica.layers.packed_linear import (
    EXPECTED_ROWS,
    FEWEST_ROWS,
    LARGE_WEIGHT,
    Multiply,
    Pack,
    find_kernels,
)

# Tokens that share one bound and one maximum; more are fewer bounds, but then more tokens to look at again.
CHUNK = 64

# Tokens computed exactly in one call, over all rows, at most this share of the vocabulary: the weights of
# scattered tokens are read about this many times slower than a product reads them in a row.
EXACT_SHARE = 16
FEWEST_EXACT = 4  # a row's, whatever the share: two or three contenders are the rule

# Norms whose product could leave float32's range are not bounded at all.
_LARGEST_PRODUCT = 1e37

_OUTPUT_ROUNDING = 2.0**-8 + 2.0**-15
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
    """A linear layer's weight in bfloat16, packed, with what is lost in it. Float32 on CPU."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, pack: Pack, multiply: Multiply
    ) -> None:
        """weight: (tokens, width) float32, contiguous; held for the exact sums, as long as this lives.

        A weight stored in less than float32 and widened, as most checkpoints are, may be given as it was
        (see `narrowed`). Raises ValueError for weights that are not numbers, or too large to be bounded.
        """
        self.num_tokens, self.width = weight.shape
        self._weight = weight.detach()
        self._bias = None if bias is None else bias.detach().float()
        bounds = _bounds(self._weight, self._bias)
        self._largest_norm = float(bounds[1].max())
        if not self._largest_norm < _LARGEST_PRODUCT or not bool(torch.isfinite(bounds).all()):
            raise ValueError("weights that are not numbers, or too large to be bounded")
        self._bounds = bounds
        self._packed = pack(_filled_up(self._weight.to(torch.bfloat16)), EXPECTED_ROWS)
        self._packed_bias = None if self._bias is None else _filled_up(self._bias.to(torch.bfloat16))
        self._multiply = multiply
        self._fewest_rows = FEWEST_ROWS if weight.numel() >= LARGE_WEIGHT else 1

    def can_bound(self, rows: torch.Tensor) -> torch.Tensor:
        """Which rows' logits are bounded, so numbers: (rows,) bool. False for NaN, infinite or huge ones."""
        bounded: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1) * self._largest_norm < _LARGEST_PRODUCT
        return bounded

    def contenders(self, rows: torch.Tensor) -> Contenders:
        """Who may have the largest logit. rows: (rows, width) float32, at least one."""
        count = rows.shape[0]
        most = max(FEWEST_EXACT, self.num_tokens // (EXACT_SHARE * count))
        approximate = self._approximate(rows).view(count, -1, CHUNK)
        errors = self._errors(rows)  # (rows, chunks)
        peaks = largest_of_chunks(approximate)
        margins = errors + _OUTPUT_ROUNDING * peaks.abs()
        limits = (peaks - margins).amax(dim=-1)  # the largest logit is at least this
        is_near = peaks + margins >= limits[:, None]
        places = is_near.nonzero()
        if places.shape[0] > most * count:  # at least a token each: whose are too many is known already
            places = (is_near & (is_near.sum(dim=-1) <= most)[:, None]).nonzero()
        of_row, chunk = places[:, 0], places[:, 1]
        near = approximate[of_row, chunk].float()
        highest = near + _OUTPUT_ROUNDING * near.abs() + errors[of_row, chunk][:, None]
        inside = (highest >= limits[of_row][:, None]).nonzero()
        of_row, tokens = of_row[inside[:, 0]], chunk[inside[:, 0]] * CHUNK + inside[:, 1]
        keep = tokens < self.num_tokens  # not the copies that fill up the last chunk
        counts = torch.bincount(of_row[keep], minlength=count)
        counts.masked_fill_((counts > most) | ~torch.isfinite(limits), 0)
        keep &= counts[of_row] > 0
        return Contenders(of_row[keep], tokens[keep], limits, counts.tolist())

    def exact(self, rows: torch.Tensor, contenders: Contenders) -> torch.Tensor:
        """The contenders' logits, summed in float64 and rounded once to float32.

        Equal weights give equal bits: every sum runs over its own contiguous products in one order.
        """
        weights = self._weight.index_select(0, contenders.tokens).double()
        logits = weights.mul_(rows.index_select(0, contenders.rows)).sum(dim=-1)
        if self._bias is not None:
            logits += self._bias.index_select(0, contenders.tokens)
        return logits.float()

    def _approximate(self, rows: torch.Tensor) -> torch.Tensor:
        """bfloat16 logits, (rows, chunks * CHUNK)."""
        rounded = rows.to(torch.bfloat16)
        if rows.shape[0] < self._fewest_rows:  # as in `PackedLinear`
            rounded = rounded.repeat(-(-self._fewest_rows // rows.shape[0]), 1)
        product = self._multiply(rounded, self._packed, self._packed_bias, "none", [], "")
        return product[: rows.shape[0]]

    def _errors(self, rows: torch.Tensor) -> torch.Tensor:
        """Terms (1) and (2), (rows, chunks); infinite for a row that cannot be bounded."""
        norms = torch.linalg.vector_norm(rows, dim=-1)
        lost = torch.linalg.vector_norm(rows - rows.to(torch.bfloat16).float(), dim=-1)
        tiny = self.width**0.5 * _TINY
        of_rows = torch.stack([norms + tiny, lost + tiny, torch.ones_like(norms)], dim=-1)
        errors = (of_rows @ self._bounds).mul_(_WIDENING * _WIDENING)  # norms, and this product
        bounded = norms * self._largest_norm < _LARGEST_PRODUCT  # not for NaN either
        return errors.masked_fill_(~bounded[:, None], float("inf"))


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


def find_screen_kernels() -> tuple[Pack, Multiply] | None:
    """oneDNN's reorder and product, if they take bfloat16 and sum it in float32; None otherwise.

    Private names, as in `packed_linear`. Processors without bfloat16 instructions imitate them, correctly
    and slowly: whether it is worth it is measured.
    """
    kernels = find_kernels()
    if kernels is None:
        return None
    pack, multiply = kernels
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        # Of two parts that cancel but for the bias: sums kept in bfloat16 would stop growing at 256.
        halves = torch.cat([torch.ones(2048), -torch.ones(2048)])
        weight = torch.stack([torch.ones(4096), halves]).to(torch.bfloat16)
        bias = torch.tensor([0.0, 3.0], dtype=torch.bfloat16)
        packed = pack(weight, EXPECTED_ROWS)
        for num_rows in (1, 5):
            ones = torch.ones(num_rows, 4096, dtype=torch.bfloat16)
            product = multiply(ones, packed, bias, "none", [], "").float()
            if product.tolist() != [[4096.0, 3.0]] * num_rows:
                return None
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return kernels


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


def _bounds(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Per chunk what |x|, |x - x'| and 1 are multiplied by, (3, chunks) float32."""
    width = weight.shape[1]
    norms, lost = [], []
    for part in map(torch.Tensor.float, _slices(weight)):
        left = part.to(torch.bfloat16).float()
        lost.append(torch.linalg.vector_norm(part - left, dim=-1))
        of_both = [torch.linalg.vector_norm(each, dim=-1) for each in (part, left)]
        norms.append(torch.maximum(*of_both))
    tiny = width**0.5 * _TINY
    # The norms' own rounding is a widening's worth; the last one covers what the bound is computed with.
    norm, loss = torch.cat(norms) * _WIDENING + tiny, torch.cat(lost) * _WIDENING + tiny
    summing = 2 * (width + 2) * 2.0**-23
    constant = torch.full_like(norm, width * _TINY**2)
    if bias is not None:
        left = bias.to(torch.bfloat16).float()
        constant += (bias - left).abs() + summing * torch.maximum(bias.abs(), left.abs())
    # |x'| is at most 1.004 |x|.
    by_token = _filled_up(torch.stack([loss + 1.01 * summing * norm, norm, constant], dim=1))
    return by_token.T.reshape(3, -1, CHUNK).amax(dim=-1)
