"""Decoder layers replaced by ours, each only if ours answers as the family's own does.

On made-up rows: what it hands to attention, with which scale, window and softcap, and what comes out. Both
are asked in float32, whatever type the layer is served in: there nothing but the order of sums differs
between layers that compute the same, and little has to be allowed. In bfloat16 a factor of 1.02 or another
activation would pass for rounding. Ours is then asked once more in the layer's own type, by what will serve,
and held to what was said in float32 within as many roundings as it makes.

Knows torch modules and how attention is called; knows neither what takes a layer's place nor why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from replica.attention.backend import AttentionCall
from replica.attention.interface import recorded
from replica.device_errors import is_out_of_memory
from replica.layers.layer_parts import Parts, parts_of

# Relative; products summed in another order differ by less than a tenth of this, anything else by far more.
TOLERANCE = 1e-5
ROUNDING = 2.0**-22  # of a sum in float32, a few times over
# A layer in half precision rounds its rows nine times on their way, each time by half an epsilon at most, in
# all four and a half. A product whose terms happen to cancel makes more of what its inputs were rounded by.
HALF_TOLERANCE = 16  # epsilons, of all rows together
# Made-up rows, from nearly zero, where a norm's epsilon counts, to as large as what attention adds to them.
SMALLEST_ROW, LARGEST_ROW = 1e-4, 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attending:
    """What a layer says to attention, the same in every step."""

    heads: int
    kv_heads: int
    dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    def call(self, packed: torch.Tensor) -> AttentionCall:
        """packed: queries, keys and values of each token, (T, heads + 2 * kv_heads, dim)"""
        by_head, num_turned = packed.transpose(0, 1), self.heads + self.kv_heads
        return AttentionCall(
            query=by_head[: self.heads],
            key=by_head[self.heads : num_turned],
            value=by_head[num_turned:],
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
        )


Build = Callable[[Parts, Attending], nn.Module]
"""What takes a layer's place: called with (1, T, width) as the layer was, it attends under its own name.

It has the layer's own parameters or others made of them, and can be given another type (`Module.to`) if it
takes layers that are not in float32. Raises ValueError for a layer that it cannot take.
"""


def swap_layers(
    model: nn.Module, run: Callable[[], object], can_take: Callable[[nn.Linear], bool], build: Build
) -> int:
    """Replace what are decoder layers of the usual kind in place; how many.

    run: a forward of the model over a few tokens at positions from the first to the last it will be given,
    to see how its layers are called. can_take: which linear layers `build` knows. A layer's weights are freed
    before the next is replaced, unless somebody else has them. Raises what says that memory ran out.
    """
    places = _places(model, can_take)
    num_layers = len(places)
    calls = _calls(list(places), run)
    count = 0
    while places:
        layer, (parent, name) = places.popitem()
        call = calls.pop(layer, None)
        block = None if call is None else _swapped(layer, call, can_take, build)
        if block is not None:
            setattr(parent, name, block)
            count += 1
        del layer  # the last reference: its weights are freed before the next are packed
    logger.info("%d of %d decoder layers are computed with fewer operations", count, num_layers)
    return count


def _places(
    model: nn.Module, can_take: Callable[[nn.Linear], bool]
) -> dict[nn.Module, tuple[nn.Module, str]]:
    """Layers that have the parts, each with the only place it is used in."""
    users: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None and parts_of(child, can_take) is not None:
                users.setdefault(child, []).append((parent, name))
    return {layer: its_users[0] for layer, its_users in users.items() if len(its_users) == 1}


@dataclass(frozen=True, slots=True)
class _Call:
    """How a layer was called, but for its rows."""

    shape: torch.Size  # of the rows
    args: tuple[Any, ...]
    options: dict[str, Any]

    def to(self, dtype: torch.dtype) -> _Call:
        return _Call(self.shape, _to(self.args, dtype), _to(self.options, dtype))


def _to(value: Any, dtype: torch.dtype) -> Any:
    """The same with what is floating in another type."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_to(each, dtype) for each in value)
    if type(value) is dict:
        return {name: _to(each, dtype) for name, each in value.items()}
    return value


def _calls(layers: list[nn.Module], run: Callable[[], object]) -> dict[nn.Module, _Call]:
    """How the forward calls these layers; without those that are not called just once."""
    calls: dict[nn.Module, list[_Call]] = {layer: [] for layer in layers}

    def note(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        rows = args[0] if args else options["hidden_states"]
        others = {name: value for name, value in options.items() if name != "hidden_states"}
        calls[layer].append(_Call(rows.shape, args[1:], others))

    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {layer: made[0] for layer, made in calls.items() if len(made) == 1}


def _swapped(
    own: nn.Module, call: _Call, can_take: Callable[[nn.Linear], bool], build: Build
) -> nn.Module | None:
    """What takes this layer's place; None if that would not answer alike."""
    parts = parts_of(own, can_take)
    assert parts is not None
    weight = parts.down.weight
    dtype = weight.dtype
    numbers = (*own.parameters(), *own.buffers())
    if any(each.dtype != dtype for each in numbers if each.is_floating_point()):
        return None  # they could not be given back the types they had
    rows = _made_up(call.shape).to(weight.device, dtype)
    try:
        own.float()
        try:
            exact, block = _built_alike(own, parts, rows.float(), call.to(torch.float32), build)
        finally:
            own.to(dtype)
        if block is None:
            return None
        if dtype != torch.float32:
            block.to(dtype)
            if not _rounds(exact, _answer(block, block, rows, call), rows):
                return None
    except Exception as error:  # called, or made, in another way, or a kernel of it is not for this card
        if is_out_of_memory(error):
            raise  # says nothing of the layer
        logger.info("a decoder layer stays as loaded: %s: %s", type(error).__name__, error)
        return None
    if hasattr(own, "attention_type"):  # some models ask their layers which mask they need
        object.__setattr__(block, "attention_type", own.attention_type)
    return block


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a layer makes of rows, and what it says to attention."""

    rows: torch.Tensor  # (1, T, width)
    said: AttentionCall


def _built_alike(
    own: nn.Module, parts: Parts, rows: torch.Tensor, call: _Call, build: Build
) -> tuple[_Answer, nn.Module | None]:
    """What this layer, in float32, answers, and what takes its place if that answers alike.

    Raises whatever a layer does that is called, or made, in another way.
    """
    answer = _answer(own, parts.attention, rows, call)
    attending = _attending(answer.said, parts)
    if attending is None:
        return answer, None
    block = build(parts, attending).train(own.training)
    ours = _answer(block, block, rows, call)
    alike = _same_call(answer.said, ours.said) and _close(answer.rows, ours.rows, added_to=rows)
    return answer, block if alike else None


def _answer(layer: nn.Module, attention: nn.Module, rows: torch.Tensor, call: _Call) -> _Answer:
    """Raises ValueError for layers that do not make rows of rows with one attention."""
    with torch.inference_mode(), recorded(attention) as said:
        answer = layer(rows, *call.args, **call.options)
    if not isinstance(answer, torch.Tensor) or answer.shape != rows.shape or len(said) != 1:
        raise ValueError("not one attention and rows for rows")
    return _Answer(answer, said[0])


def _made_up(shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    steps = torch.linspace(0.0, 1.0, shape[1])[None, :, None]
    sizes = SMALLEST_ROW * (LARGEST_ROW / SMALLEST_ROW) ** steps
    return torch.randn(shape, generator=generator) * sizes


def _attending(said: AttentionCall, parts: Parts) -> Attending | None:
    heads, _, dim = said.query.shape
    kv_heads = said.key.shape[0]
    sizes = [linear.out_features for linear in parts.qkv]
    if sizes != [heads * dim, kv_heads * dim, kv_heads * dim]:
        return None
    return Attending(heads, kv_heads, dim, said.scale, said.window, said.softcap, said.sinks)


def _same_call(own: AttentionCall, ours: AttentionCall) -> bool:
    given = [
        (call.query.shape, call.key.shape, call.value.shape, call.scale, call.window, call.softcap)
        for call in (own, ours)
    ]
    pairs = ((own.query, ours.query), (own.key, ours.key), (own.value, ours.value))
    return (
        given[0] == given[1]
        and own.sinks is ours.sinks
        and all(_close(mine, theirs) for mine, theirs in pairs)
    )


def _close(own: torch.Tensor, ours: torch.Tensor, added_to: torch.Tensor | None = None) -> bool:
    """Every row by itself, or a large one would hide a small one; not for NaN.

    added_to: what both are sums with; only what was added is compared, but the sum was rounded.
    """
    size = torch.linalg.vector_norm(own if added_to is None else own - added_to, dim=-1)
    allowed = TOLERANCE * size
    if added_to is not None:
        allowed += ROUNDING * torch.linalg.vector_norm(added_to, dim=-1)
    return bool((torch.linalg.vector_norm(own - ours, dim=-1) <= allowed).all())


def _rounds(exact: _Answer, ours: _Answer, rows: torch.Tensor) -> bool:
    """Whether an answer in half precision is one in float32, rounded on its way. rows: given to both.

    All rows together: those nearly zero have few bits in float16, and what is wrong is so in all of them.
    """
    epsilon = torch.finfo(ours.rows.dtype).eps
    said = [(call.query, call.key, call.value) for call in (exact.said, ours.said)]
    added = exact.rows - rows.float()
    pairs = [(one, other, one.norm()) for one, other in zip(*said, strict=True)]
    # The sum is rounded as such, whatever was added.
    pairs.append((exact.rows, ours.rows, added.norm() + rows.float().norm() / HALF_TOLERANCE))
    return all(
        bool((one - other.float()).norm() <= HALF_TOLERANCE * epsilon * size) for one, other, size in pairs
    )
