"""A prefill's attention from torch's flash kernel for CPUs, in parts of the shapes it is fast at.

SDPA ends in that kernel, and hides that it also returns the weight each row's keys had (log-sum-exp). By it
attentions over some of the keys each are merged into the one over all, without any mask:

           context  │  new tokens
        ────────────┼──────────────
        every query │ causal: itself and
        sees all    │ those before it

The kernel takes 256 rows at a time where there are 768, and 64 where there are fewer; as many columns of
scores as there are keys, up to 512. Hence (microseconds of a layer on one AVX2 core, torch 2.13, float32, 2
K/V heads of 32, 4 query heads each):

- over the context the query heads of a K/V head are one long axis of rows: its large tiles;
- 384 to 767 new tokens are cut into halves, of which the second sees the whole first by such rows: 512
  tokens take 5,950 and not 6,600;
- keys that are no multiple of a vector leave rows of scores that begin anywhere, and a tail that is computed
  number by number. A decode in the same step is all it takes: 511 tokens after 511 took 11,000. The context's
  odd keys join the new tokens, behind rows that nobody asked for, and zeros fill up the end: 9,400.

Knows tensors; knows neither pages nor requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import pad

FEWEST_ROWS = 384  # with fewer, cutting and filling up take as long as they save
LARGE_TILE_ROWS = 768  # from here on the kernel takes its largest tiles by itself
LANES = 16  # numbers in a vector of AVX-512; two of AVX2

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]
KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class _Part(NamedTuple):
    """Attention over some of the keys."""

    attended: torch.Tensor  # (kv_heads, group, rows, dim)
    log_weight: torch.Tensor  # (kv_heads, group, rows), float32

    def rows(self, first: int, count: int) -> _Part:
        return _Part(self.attended.narrow(2, first, count), self.log_weight.narrow(2, first, count))

    def merged(self, other: _Part) -> _Part:
        """Over the keys of both."""
        share = torch.sigmoid(other.log_weight - self.log_weight).unsqueeze(-1)
        return _Part(
            torch.lerp(self.attended, other.attended, share.to(self.attended.dtype)),
            torch.logaddexp(self.log_weight, other.log_weight),
        )


class CpuFlash:
    """Attention without mask, softcap or sinks, of as many numbers a value as a key."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    @classmethod
    def find(cls, device: torch.device) -> CpuFlash | None:
        """None on other devices, and where the kernel is not what it was.

        It has no public name (seen in torch 2.11 and 2.13), so it is tried once on a tiny input and left
        alone unless it behaves.
        """
        if device.type != "cpu":
            return None
        try:
            kernel: Kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            probe = torch.ones(1, 1, 2, 8)
            # Not scale 0, which would be simpler: the kernel scales after masking, and 0 * -inf is NaN.
            attended, log_weight = kernel(probe, probe, probe, is_causal=True, scale=1.0)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return None
        expected = 8 + torch.tensor([1.0, 2.0]).log()  # row 0 sees one key, row 1 two, each with a score of 8
        agrees = torch.allclose(attended, probe) and torch.allclose(log_weight.flatten().float(), expected)
        return cls(kernel) if agrees else None

    def attend(
        self, query: torch.Tensor, new: KeysAndValues, context: KeysAndValues | None, scale: float
    ) -> torch.Tensor:
        """Query i sees the context and new tokens up to i: (kv_heads, group, n, dim).

        query (kv_heads, group, n, dim); new (kv_heads, n, dim) twice; context (kv_heads, num_context, dim)
        twice.
        """
        num_rows = query.shape[2]
        if num_rows < FEWEST_ROWS:
            among = self._causal(query, *new, scale)
        else:
            num_odd = context[0].shape[1] % LANES if context is not None else 0
            among = self._causal(*_filled_up(query, new, context, num_odd), scale).rows(num_odd, num_rows)
            context = _without_last(context, num_odd)
        if context is None:
            return among.attended
        return among.merged(self._over_all(query, *context, scale)).attended

    def _causal(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> _Part:
        """Row i sees keys up to i."""
        kv_heads, group, num_rows, dim = query.shape
        if not FEWEST_ROWS <= num_rows < LARGE_TILE_ROWS:
            keys, values = (each[:, None].expand(kv_heads, group, num_rows, dim) for each in (key, value))
            return _Part(*self._kernel(query, keys, values, is_causal=True, scale=scale))
        half = _multiple(num_rows // 2)
        first = self._causal(query[:, :, :half], key[:, :half], value[:, :half], scale)
        rest = query[:, :, half:]
        second = self._causal(rest, key[:, half:], value[:, half:], scale).merged(
            self._over_all(rest, key[:, :half], value[:, :half], scale)
        )
        return _Part(*(torch.cat(both, dim=2) for both in zip(first, second, strict=True)))

    def _over_all(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> _Part:
        """Every row sees every key."""
        kv_heads, group, num_rows, dim = query.shape
        folded = query.reshape(1, kv_heads, group * num_rows, dim)
        attended, log_weight = self._kernel(folded, key[None], value[None], scale=scale)
        return _Part(attended.reshape(query.shape), log_weight.reshape(query.shape[:3]))


def _filled_up(
    query: torch.Tensor, new: KeysAndValues, context: KeysAndValues | None, num_odd: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, keys and values: the last `num_odd` tokens of context, the new ones, zeros up to `LANES`."""
    length = num_odd + query.shape[2]
    missing = _multiple(length) - length
    keys, values = new
    if context is not None and num_odd:
        keys, values = (
            torch.cat([before[:, -num_odd:], each], dim=1) for before, each in zip(context, new, strict=True)
        )
    if missing:  # keys behind every row that is asked for: none of them sees one
        keys, values = pad(keys, (0, 0, 0, missing)), pad(values, (0, 0, 0, missing))
    return (pad(query, (0, 0, num_odd, missing)) if num_odd or missing else query), keys, values


def _without_last(context: KeysAndValues | None, num_odd: int) -> KeysAndValues | None:
    if context is None or context[0].shape[1] == num_odd:
        return None
    keys, values = context
    return keys[:, : keys.shape[1] - num_odd], values[:, : values.shape[1] - num_odd]


def _multiple(length: int) -> int:
    """The next multiple of `LANES`."""
    return -(-length // LANES) * LANES
