"""Triton kernels: what a decoder layer does to its rows between two products, each in one passage over them.

Importing this imports Triton; whether the kernels are then compiled or interpreted is Triton's setting at
that moment (`TRITON_INTERPRET`). Knows pointers and widths; knows neither torch nor layers.

All compute in float32 and round once, where they store; tensors are contiguous. LANES are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def norm(
    normed,  # (T, WIDTH)
    total,  # (T, WIDTH); not written without HAS_TERMS
    rows,  # (T, WIDTH)
    terms,  # (T, WIDTH); not read without HAS_TERMS
    weight,  # (WIDTH,)
    epsilon,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    HAS_TERMS: tl.constexpr,
):
    """RMS norm of a row, or of its sum with another, which is kept. Grid: (T,)."""
    lane = tl.arange(0, LANES)
    is_lane = lane < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + lane
    # Asked for before the sum over the row, which everything has to wait for.
    factor = tl.load(weight + lane, mask=is_lane, other=0.0).to(tl.float32)
    numbers = tl.load(rows + place, mask=is_lane, other=0.0).to(tl.float32)
    if HAS_TERMS:
        numbers += tl.load(terms + place, mask=is_lane, other=0.0).to(tl.float32)
        rounded = numbers.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=is_lane)
        numbers = rounded.to(tl.float32)  # of what the next layers see
    scale = tl.rsqrt(tl.sum(numbers * numbers, axis=0) / WIDTH + epsilon)
    tl.store(normed + place, (numbers * scale * factor).to(normed.dtype.element_ty), mask=is_lane)


@triton.jit
def turn(
    heads,  # (T, ALL, DIM), changed: queries, then keys, then values, which are not touched
    weights,  # (2, DIM): of queries' norm and of keys'; not read without HAS_NORMS
    cosines,  # (T, DIM)
    sines,  # (T, DIM)
    epsilon,
    QUERIES: tl.constexpr,  # heads of queries
    TURNED: tl.constexpr,  # and of keys with them
    ALL: tl.constexpr,  # and of values
    DIM: tl.constexpr,
    LANES: tl.constexpr,  # of half a head
    HEADS: tl.constexpr,  # that one program turns
    HAS_NORMS: tl.constexpr,
):
    """Queries and keys, each head normed and one half of it turned against the other.

    The rotary embedding of all families but those that pair neighbours, or turn a part of each head.
    Grid: (T, tiles of heads).
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, LANES)
    half: tl.constexpr = DIM // 2
    is_lane = lane < half
    is_there = (head < TURNED)[:, None] & is_lane[None, :]
    place = heads + (token * ALL + head)[:, None] * DIM + lane[None, :]
    angle = token * DIM + lane
    low_cosine = tl.load(cosines + angle, mask=is_lane, other=0.0).to(tl.float32)[None, :]
    high_cosine = tl.load(cosines + angle + half, mask=is_lane, other=0.0).to(tl.float32)[None, :]
    low_sine = tl.load(sines + angle, mask=is_lane, other=0.0).to(tl.float32)[None, :]
    high_sine = tl.load(sines + angle + half, mask=is_lane, other=0.0).to(tl.float32)[None, :]
    low = tl.load(place, mask=is_there, other=0.0).to(tl.float32)
    high = tl.load(place + half, mask=is_there, other=0.0).to(tl.float32)
    if HAS_NORMS:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        scale = tl.rsqrt(squares / DIM + epsilon)[:, None]
        factor = weights + (head >= QUERIES).to(tl.int32)[:, None] * DIM + lane[None, :]
        low *= scale * tl.load(factor, mask=is_there, other=0.0).to(tl.float32)
        high *= scale * tl.load(factor + half, mask=is_there, other=0.0).to(tl.float32)
    turned = low * low_cosine - high * low_sine
    tl.store(place, turned.to(heads.dtype.element_ty), mask=is_there)
    turned = high * high_cosine + low * high_sine
    tl.store(place + half, turned.to(heads.dtype.element_ty), mask=is_there)


@triton.jit
def swish_product(
    out,  # (T, WIDTH)
    gate_up,  # (T, 2 * WIDTH): gates, then what they are multiplied with
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,  # that one program computes
):
    """silu(gate) * up. Grid: (T, tiles of lanes)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    is_lane = lane < WIDTH
    place = gate_up + row * (2 * WIDTH) + lane
    gate = tl.load(place, mask=is_lane, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=is_lane, other=0.0).to(tl.float32)
    shrunk = tl.exp2(tl.abs(gate) * -LOG2_E)  # at most 1, so nothing overflows
    sigmoid = tl.where(gate < 0, shrunk, 1.0) / (1.0 + shrunk)
    tl.store(out + row * WIDTH + lane, (gate * sigmoid * up).to(out.dtype.element_ty), mask=is_lane)
