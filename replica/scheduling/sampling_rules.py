"""Sampling parameters that would make a step fail for its innocent neighbours too.

The router's edge validates what clients send; this guards the batch against everything else, and against
what this runner cannot do. Knows values and their ranges; knows neither tokens nor steps.
"""

from __future__ import annotations

import math

from cache.messages import SamplingParams
from replica.errors import InvalidRequest
from replica.scheduling.runner import RunnerInfo

# Beyond these a float32 logit divided or multiplied by it may leave its range.
PENALTY_RANGE = (0.01, 100.0)
MAX_LOGPROBS = 20  # most probable tokens beside each; more would be sent than is computed
MAX_BIAS = 100.0

_NEUTRAL = SamplingParams(max_tokens=1)
_ABOUT_LOGITS = (
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
)


def check_sampling(sampling: SamplingParams, info: RunnerInfo) -> None:
    """Raises InvalidRequest, naming the field."""
    _check_bounds(sampling)
    if not info.has_logits:
        _check_needs_no_logits(sampling, info.device)
    _check_bias(sampling, info.vocab_size)


def _check_bounds(sampling: SamplingParams) -> None:
    if sampling.max_tokens < 1:
        raise InvalidRequest("max_tokens", f"{sampling.max_tokens} is less than 1")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise InvalidRequest(
            "min_tokens", f"{sampling.min_tokens} is not between 0 and max_tokens = {sampling.max_tokens}"
        )
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidRequest("temperature", f"{sampling.temperature} is not a finite number >= 0")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest("top_p", f"{sampling.top_p} is not in (0, 1]")
    if sampling.top_k < 0:
        raise InvalidRequest("top_k", f"{sampling.top_k} is negative")
    if any(not stop for stop in sampling.stop):
        raise InvalidRequest("stop", "a stop string is empty")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidRequest("min_p", f"{sampling.min_p} is not in [0, 1]")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= getattr(sampling, name) <= 2:
            raise InvalidRequest(name, f"{getattr(sampling, name)} is not in [-2, 2]")
    low, high = PENALTY_RANGE
    if not low <= sampling.repetition_penalty <= high:
        raise InvalidRequest("repetition_penalty", f"{sampling.repetition_penalty} is not in [{low}, {high}]")
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(sampling, name)
        if wanted is not None and not 0 <= wanted <= MAX_LOGPROBS:
            raise InvalidRequest(name, f"{wanted} is not between 0 and {MAX_LOGPROBS}")


def _check_bias(sampling: SamplingParams, vocab_size: int) -> None:
    ids = [token_id for token_id, _ in sampling.logit_bias]
    if len(set(ids)) < len(ids):
        raise InvalidRequest("logit_bias", "a token id is there twice")
    if any(not 0 <= token_id < vocab_size for token_id in ids):
        raise InvalidRequest("logit_bias", f"ids must be between 0 and {vocab_size - 1}")
    if any(not -MAX_BIAS <= bias <= MAX_BIAS for _, bias in sampling.logit_bias):
        raise InvalidRequest("logit_bias", f"a bias is not in [{-MAX_BIAS:g}, {MAX_BIAS:g}]")


def _check_needs_no_logits(sampling: SamplingParams, device: str) -> None:
    """A made-up token has no distribution that could be changed or told of."""
    for name in _ABOUT_LOGITS:
        if getattr(sampling, name) != getattr(_NEUTRAL, name):
            raise InvalidRequest(name, f"this replica's model is {device} and has no logits")
