"""Prefill times that Preble and its port measured and wrote into their sources: Mistral-7B on two GPUs.

Source: Preble 8e7906a (2024-05-24), A6000; AIBrix e3e10f9e (2026-08-22), V100, scaled from it. Knows numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

_BATCH_EFFICIENCY = 0.9  # the sources divide every time by it


@dataclass(frozen=True, slots=True)
class ProfiledPrefill:
    """Milliseconds as pieces of polynomials in tokens of the batch and of the context."""

    small_ms: float  # below 192 tokens
    medium_ms: tuple[float, float, float]  # below 384: constant, linear, quadratic
    large_ms: tuple[float, float]  # from there: constant, linear
    short_attention_ms: float  # up to 1,024 tokens of context
    long_attention_ms: tuple[float, float]  # beyond: constant, linear
    quadratic_ms: tuple[float, float, float]  # from 4,096 tokens: constant, linear, quadratic

    def seconds(self, num_tokens: int, context_tokens: int) -> float:
        """To compute so many tokens that end a context of so many."""
        time_ms = self._linear_ms(num_tokens) + self._attention_ms(num_tokens, context_tokens)
        if num_tokens >= 4096:
            constant, linear, quadratic = self.quadratic_ms
            time_ms += constant + linear * num_tokens + quadratic * num_tokens**2
        return time_ms / 1000.0 / _BATCH_EFFICIENCY

    def _linear_ms(self, num_tokens: int) -> float:
        if num_tokens >= 384:
            return self.large_ms[0] + self.large_ms[1] * num_tokens
        if num_tokens >= 192:
            constant, linear, quadratic = self.medium_ms
            return constant + linear * num_tokens + quadratic * num_tokens**2
        return self.small_ms

    def _attention_ms(self, num_tokens: int, context_tokens: int) -> float:
        if context_tokens <= 1024:
            return self.short_attention_ms
        time_ms = self.long_attention_ms[0] + self.long_attention_ms[1] * context_tokens
        return time_ms / 2 if num_tokens <= 1024 else time_ms  # few new tokens share their reads


A6000_MISTRAL_7B = ProfiledPrefill(
    small_ms=22.0,
    medium_ms=(-118.0, 1.25, -2.56e-3),
    large_ms=(4.209777, 0.1084257),
    short_attention_ms=0.32,
    long_attention_ms=(0.159, 1.86e-4),
    quadratic_ms=(-7.37, 3.86e-3, 2.16e-6),
)
V100_MISTRAL_7B = ProfiledPrefill(
    small_ms=55.0,
    medium_ms=(-295.0, 3.125, -6.4e-3),
    large_ms=(10.524443, 0.2710643),
    short_attention_ms=0.80,
    long_attention_ms=(0.398, 4.65e-4),
    quadratic_ms=(-18.425, 9.65e-3, 5.4e-6),
)
