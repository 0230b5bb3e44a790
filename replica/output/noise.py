"""The randomness of a draw: Gumbel noise that is a hash of (seed, position, token id).

No generator, no state: the same integers on every device, whatever the batch. Knows integers and tensors;
knows neither logits nor requests.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from replica.transfer import to_device

_MASK_64 = (1 << 64) - 1


def seed_keys(seeds: Iterable[int]) -> npt.NDArray[np.uint64]:
    """What of a draw's key depends on its seed alone; seeds of any size and sign, taken modulo 2^64."""
    return _splitmix(np.array([seed & _MASK_64 for seed in seeds], dtype=np.uint64))


def draw_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> torch.Tensor:
    """64 well-mixed bits of each (seed, position), (rows, 2) int32, the low half first.

    seeds: from `seed_keys`. Source: splitmix64's finalizer, once for the seed and once for both.
    """
    mixed = _splitmix(seeds ^ positions.astype(np.uint64))
    halves = np.stack([mixed & np.uint64(0xFFFFFFFF), mixed >> np.uint64(32)], axis=1)
    return torch.from_numpy(halves.astype(np.uint32).view(np.int32))


def _splitmix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def gumbel_noise(keys: torch.Tensor, vocabulary: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise, (rows, vocabulary) float32: a pure function of (row's key, token id).

    keys: from `draw_keys`. A 32-bit integer hash of the token id, keyed before and between its rounds.
    """
    keys = to_device(keys.numpy(), device)
    first, second = keys[:, :1], keys[:, 1:]
    bits = torch.arange(vocabulary, dtype=torch.int32, device=device)[None] * _signed(0x9E3779B9) ^ first
    _mix(bits, 16, 0x7FEB352D)
    _mix(bits, 15, 0x846CA68B)
    bits.bitwise_xor_(second)
    _mix(bits, 16, 0x21F0AAAD)
    _mix(bits, 15, 0x735A2D97)
    bits.bitwise_xor_(_shifted(bits, 15)).bitwise_and_(0x7FFFFFFF)
    # The winner is the smallest exponential: taken from numbers near 0, where float32 is finest.
    # Its end is below 1, to which the largest would round: who waits for ever loses also where it is alone.
    uniform = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(bits: torch.Tensor, shift: int, factor: int) -> None:
    bits.bitwise_xor_(_shifted(bits, shift)).mul_(_signed(factor))


def _shifted(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """Logical right shift of int32 (torch's is arithmetic)."""
    return (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
