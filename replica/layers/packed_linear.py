"""Linear layers whose weights are laid out once for oneDNN, where that is faster: float32 on CPU.

torch multiplies by a row-major weight and lays it out anew in every call; with few rows, as in a decode,
that takes as long as the multiplication. Laid out at load it is the same product, summed in another
order. Measured on one AVX-512 core (weights 768 x 2304, out of cache), torch 2.13:

    rows          1      8      32     512
    as loaded   0.55   0.85   1.73   18.6   ms
    packed      0.37   0.48   1.17   16.6

With AVX2 (weights 3072 x 768, `python -m benchmarks.products`):

    rows          1      8      32     512
    as loaded   0.74   1.59   2.85   34.6   ms
    packed      0.76   1.24   2.54   36.9

Layers that are given the same rows (query, key and value; gate and up) are packed as one: fewer, larger
products, which shows where they are small (256 x 384 as three and as one, one row: 54 and 30 us).

Knows torch modules; knows neither steps nor pages.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from replica.layers.linear_siblings import find_siblings

logger = logging.getLogger(__name__)

# The layout depends on the rows it is told to expect: one for many is as good for few, not the reverse.
EXPECTED_ROWS = 512

# What its kernels are good at depends on the vectors they are made for.
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"

# With AVX-512 one or two rows take longer than four (132M: 29 and 35 ms a step, against 23), so that fewer
# are repeated; not where the weight is so small (1 MiB) that repeating them takes longer. With AVX2 one
# row is multiplied in 0.76 ms (3072 x 768), four of it in 1.00.
FEWEST_ROWS = 4 if HAS_AVX512 else 1
LARGE_WEIGHT = 1 << 18

# With AVX2 they fall behind where many terms are summed for few outputs, as behind an MLP (768 x 3072, 1, 8,
# 32 and 512 rows: 0.65, 1.85, 3.2 and 34 ms as loaded; 0.84, 1.48, 3.1 and 38 packed).
DEEP = 2  # times as many inputs as outputs

Pack = Callable[[torch.Tensor, int], torch.Tensor]
Multiply = Callable[..., torch.Tensor]


NO_SCALARS: list[float] = []


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed weight, for inference only."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, pack: Pack, multiply: Multiply
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # A plain attribute: `.weight.dtype` and `.weight.device` still answer, the rest is opaque, and a
        # buffer or parameter would be looked up through `Module.__getattr__` in every call.
        object.__setattr__(self, "weight", pack(weight.detach(), EXPECTED_ROWS))
        object.__setattr__(self, "bias", bias)
        self._multiply = multiply
        self._fewest_rows = FEWEST_ROWS if weight.numel() >= LARGE_WEIGHT else 1

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Without what torch does around a module's forward, which takes as long as a small product.

        Hooks are therefore not called; whatever has some when it is packed is left as it is.
        """
        return self.forward(rows)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        shape = rows.shape
        if len(shape) > 1 and shape[-2] >= self._fewest_rows:
            return self._multiply(rows, self.weight, self.bias, "none", NO_SCALARS, "")
        return self._with_few(rows)

    def _with_few(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.dim() < 2:
            return self._with_few(rows[None])[0]
        count = rows.shape[-2]
        if count == 0:
            return rows.new_zeros(*rows.shape[:-1], self.out_features)
        repeated = torch.cat([rows] * -(-self._fewest_rows // count), dim=-2)
        return self._multiply(repeated, self.weight, self.bias, "none", NO_SCALARS, "")[..., :count, :]


class _Whole:
    """Several layers' product, and which parts of the newest one have not been asked for yet."""

    def __init__(self, packed: PackedLinear, sizes: Sequence[int]) -> None:
        self.packed = packed
        self.sizes = list(sizes)
        self._first = list(itertools.accumulate(sizes, initial=0))
        self._rows: torch.Tensor | None = None  # held, so that no other tensor can be taken for it
        self._product: torch.Tensor | None = None
        self._left: set[int] = set()

    def part(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        if rows is not self._rows or index not in self._left:
            self._rows, self._product = rows, self.packed(rows)
            self._left = set(range(len(self.sizes)))
        assert self._product is not None
        part = self._product.narrow(-1, self._first[index], self.sizes[index])
        self._left.remove(index)
        if not self._left:
            self._rows = self._product = None
        return part


class PackedPart(nn.Module):
    """One of several linear layers packed as one; whichever is called first computes all of them."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, whole: _Whole, index: int) -> None:
        super().__init__()
        self.in_features, self.out_features = whole.packed.in_features, whole.sizes[index]
        for name in ("weight", "bias"):  # the whole's: to be asked for dtype and device
            object.__setattr__(self, name, getattr(whole.packed, name))
        self._whole, self._index = whole, index

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """As `PackedLinear`'s."""
        return self._whole.part(rows, self._index)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._whole.part(rows, self._index)


def pack_linears(model: nn.Module, run: Callable[[], object] | None = None) -> int:
    """Replace the model's float32 CPU `nn.Linear`s in place; how many. 0 where oneDNN is not to be had.

    run: a forward of the model, to see which layers are given the same rows; None packs each by itself.
    Subclasses stay as they are, since what they add is not known here, and so do layers that are faster so.
    Each weight is packed and freed before the next, so memory grows only where a weight is shared (tied
    embeddings) and therefore not freed.
    """
    kernels = find_kernels()
    if kernels is None:
        logger.info("oneDNN's packed product is missing; linear layers stay as loaded")
        return 0
    places = _linears(model)
    only_parents = {linear: users[0][0] for linear, users in places.items() if len(users) == 1}
    siblings = find_siblings(only_parents, run) if run is not None else []
    only_parents.clear()
    count = 0
    while siblings:
        together = siblings.pop()
        users = [user for linear in together for user in places.pop(linear)]
        for (parent, name), part in zip(users, _pack_together(together, *kernels), strict=True):
            setattr(parent, name, part)
        count += len(together)
        del together  # the last references: these weights are freed before the next are packed
    while places:
        linear, its_users = places.popitem()
        if is_better_as_loaded(linear.weight):
            continue
        count += 1
        packed = PackedLinear(linear.weight, linear.bias, *kernels).train(linear.training)
        for parent, name in its_users:
            setattr(parent, name, packed)
        del linear
    return count


def _pack_together(linears: Sequence[nn.Linear], pack: Pack, multiply: Multiply) -> list[PackedPart]:
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    packed = PackedLinear(weight, torch.cat(biases) if biases else None, pack, multiply)
    whole = _Whole(packed, [linear.out_features for linear in linears])
    return [PackedPart(whole, index).train(linear.training) for index, linear in enumerate(linears)]


def _linears(model: nn.Module) -> dict[nn.Linear, list[tuple[nn.Module, str]]]:
    """What can be packed, and every place it is used in."""
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():  # named_children() leaves a second use out
            if isinstance(child, nn.Linear) and can_pack(child):
                places.setdefault(child, []).append((parent, name))
    return places


def can_pack(linear: nn.Linear) -> bool:
    weight = linear.weight
    return (
        type(linear) is nn.Linear
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.numel() > 0
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
    )


def is_better_as_loaded(weight: torch.Tensor) -> bool:
    """Whether torch's own product by this weight, (outputs, inputs), is the faster one on this machine."""
    return not HAS_AVX512 and weight.shape[1] >= DEEP * weight.shape[0]


def find_kernels() -> tuple[Pack, Multiply] | None:
    """oneDNN's reorder and product; None where they are not to be had.

    Not public names (torch's own compiler emits them; seen in torch 2.11 and 2.13), so they are tried
    once on a small input, at row counts on both sides of the expected, and left alone unless they behave.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    try:
        pack: Pack = torch.ops.mkldnn._reorder_linear_weight.default
        multiply: Multiply = torch.ops.mkldnn._linear_pointwise.default
        weight, bias = torch.arange(-32.0, 32.0).view(4, 16), torch.arange(4.0)
        packed = pack(weight, EXPECTED_ROWS)
        for num_rows in (1, 5):
            rows = torch.arange(16.0 * num_rows).view(1, num_rows, 16)
            # Small integers: exact in float32 in whatever order they are summed.
            for offset in (None, bias):
                expected = nn.functional.linear(rows, weight, offset)
                if not torch.equal(multiply(rows, packed, offset, "none", [], ""), expected):
                    return None
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return pack, multiply
