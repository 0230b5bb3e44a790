"""What a network's steps need of a card, by arithmetic: operations for prefills, bytes for decodes. Pure."""

from __future__ import annotations

from benchmarks.cases import ModelSpec


def layer_weights(spec: ModelSpec) -> int:
    """Numbers in the matrices of all layers: every token is multiplied with each once."""
    attention = spec.hidden * spec.head_dim * 2 * (spec.heads + spec.kv_heads)
    return spec.layers * (attention + 3 * spec.hidden * spec.mlp)


def head_weights(spec: ModelSpec) -> int:
    """Numbers in the output layer: multiplied once for each token that is drawn."""
    return spec.vocabulary * spec.hidden


def prefill_operations(spec: ModelSpec, num_tokens: int, cached: int = 0) -> float:
    """Of one prompt's uncached tokens; a multiply-add is two operations. Scores: the causal half alone."""
    new = num_tokens - cached
    pairs = sum_of_positions(num_tokens) - sum_of_positions(cached)
    attention = 4.0 * spec.layers * spec.heads * spec.head_dim * pairs
    return 2.0 * layer_weights(spec) * new + attention + 2.0 * head_weights(spec)


def sum_of_positions(num_tokens: int) -> int:
    """(query, key) pairs of a causal prompt."""
    return num_tokens * (num_tokens + 1) // 2


def kv_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Of one token's keys and values in all layers."""
    return spec.layers * spec.kv_heads * spec.head_dim * 2 * itemsize


def fewest_bytes(spec: ModelSpec, pool_tokens: int, itemsize: int) -> int:
    """Memory taken at least: weights, and room for so many tokens' keys and values."""
    return spec.num_parameters * itemsize + pool_tokens * kv_bytes(spec, itemsize)


def decode_bytes(spec: ModelSpec, batch: int, context: float, itemsize: int) -> float:
    """That a step of `batch` decodes must read: each weight once, and each sequence's keys and values."""
    weights = layer_weights(spec) + head_weights(spec)
    return weights * itemsize + batch * context * kv_bytes(spec, itemsize)
