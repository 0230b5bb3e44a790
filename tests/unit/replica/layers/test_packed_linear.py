"""Linear layers laid out for oneDNN: the same product, and only where it is known to be the same."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from replica.layers import packed_linear
from replica.layers.packed_linear import PackedLinear, pack_linears

HAS_KERNELS = packed_linear.find_kernels() is not None
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def has_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has: which layers are packed, and how few rows are repeated, depend on it."""
    monkeypatch.setattr(packed_linear, "HAS_AVX512", True)
    monkeypatch.setattr(packed_linear, "FEWEST_ROWS", 4)


class Shared(nn.Module):
    """A linear layer used in two places, beside one whose weight an embedding shares."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.second = self.first
        self.embedding = nn.Embedding(40, 24)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.second(self.first(self.embedding(ids))))
        return out


class Doubled(nn.Linear):
    """A subclass that does something else with its weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


@needs_kernels
@pytest.mark.parametrize("width", [160, 3000], ids=["small", "large"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 7, 33, 512, 600])
def test_the_product_is_the_same_for_any_number_of_rows(num_rows: int, bias: bool, width: int) -> None:
    torch.manual_seed(num_rows)
    model = nn.Sequential(nn.Linear(96, width, bias=bias)).eval()
    rows = torch.randn(1, num_rows, 96)
    with torch.inference_mode():
        expected = model(rows)
        assert pack_linears(model) == 1
        assert isinstance(model[0], PackedLinear)
        torch.testing.assert_close(model(rows), expected, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("shape", [(96,), (1, 96), (3, 96), (2, 1, 96), (2, 3, 5, 96), (0, 96)])
def test_the_product_keeps_the_shape_that_torchs_would_have(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 3000)).eval()
    rows = torch.randn(shape)
    with torch.inference_mode():
        expected = model(rows)
        pack_linears(model)
        torch.testing.assert_close(model(rows), expected, rtol=1e-5, atol=1e-5)


@needs_kernels
def test_a_shared_module_stays_one_and_a_shared_weight_stays_whole() -> None:
    torch.manual_seed(0)
    model = Shared().eval()
    ids = torch.arange(11)[None]
    with torch.inference_mode():
        expected = model(ids)
        assert pack_linears(model) == 2
        assert model.first is model.second
        assert model.embedding.weight.shape == (40, 24)
        torch.testing.assert_close(model(ids), expected, rtol=1e-5, atol=1e-5)


@needs_kernels
def test_code_that_asks_a_layer_for_its_dtype_and_sizes_still_gets_them() -> None:
    model = nn.Sequential(nn.Linear(8, 4)).eval()
    pack_linears(model)
    packed = model[0]
    assert isinstance(packed, PackedLinear)
    assert isinstance(packed.weight, torch.Tensor)
    assert packed.weight.dtype == torch.float32
    assert packed.weight.device.type == "cpu"
    assert packed.in_features == 8
    assert packed.out_features == 4


@needs_kernels
def test_each_weight_is_freed_before_the_next_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's weights are never in memory twice."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).eval()
    alive = [weakref.ref(layer) for layer in model]
    seen: list[int] = []
    kernels = packed_linear.find_kernels()
    assert kernels is not None
    pack, multiply = kernels

    def counting(weight: torch.Tensor, num_rows: int) -> torch.Tensor:
        seen.append(sum(ref() is not None for ref in alive))
        return pack(weight, num_rows)

    monkeypatch.setattr(packed_linear, "find_kernels", lambda: (counting, multiply))
    assert pack_linears(model) == 4
    assert seen == [4, 3, 2, 1]


class Gated(nn.Module):
    """Three layers of one input and one of another; `skips` leaves a sibling out."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(24, 40, bias=bias), nn.Linear(24, 40, bias=bias)
        self.scale = nn.Linear(24, 1, bias=bias)
        self.down = nn.Linear(40, 24, bias=bias)
        self.skips = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gated = torch.sigmoid(self.gate(rows)) * self.up(rows)
        out: torch.Tensor = self.down(gated if self.skips else gated * self.scale(rows))
        return out


@needs_kernels
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 600])
def test_layers_of_one_input_are_packed_as_one_and_give_the_same(num_rows: int, bias: bool) -> None:
    torch.manual_seed(num_rows)
    model = Gated(bias).eval()
    many = [torch.randn(1, num_rows, 24) for _ in range(3)]
    with torch.inference_mode():
        expected = [model(rows) for rows in many]
        assert pack_linears(model, run=lambda: model(torch.randn(1, 2, 24))) == 4
        kinds = {name: type(child).__name__ for name, child in model.named_children()}
        assert kinds == dict.fromkeys(("gate", "up", "scale"), "PackedPart") | {"down": "PackedLinear"}
        assert [part.out_features for part in (model.gate, model.up, model.scale)] == [40, 40, 1]
        for rows, wanted in zip(many, expected, strict=True):
            torch.testing.assert_close(model(rows), wanted, rtol=1e-5, atol=1e-5)


@needs_kernels
def test_with_avx2_deep_layers_stay_as_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that are packed as one with others."""
    monkeypatch.setattr(packed_linear, "HAS_AVX512", False)
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 32), nn.Linear(32, 17), Gated(bias=True)).eval()
    assert pack_linears(model, run=lambda: model[3](torch.zeros(1, 2, 24))) == 6
    assert [type(layer) for layer in model[:3]] == [PackedLinear, nn.Linear, PackedLinear]


@needs_kernels
def test_a_part_that_nobody_asked_for_is_no_later_forwards() -> None:
    """A forward that leaves one of them out, or stops halfway, must not be answered for by the next."""
    torch.manual_seed(0)
    model = Gated(bias=True).eval()
    first, second = torch.randn(1, 3, 24), torch.randn(1, 3, 24)
    with torch.inference_mode():
        expected = model(second)
        pack_linears(model, run=lambda: model(first))
        model.skips = True
        model(first)
        model.skips = False
        torch.testing.assert_close(model(second), expected, rtol=1e-5, atol=1e-5)
        model.gate(first)  # and then it raised
        torch.testing.assert_close(model(second), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(second), expected, rtol=1e-5, atol=1e-5)  # the same tensor again


@needs_kernels
def test_nothing_is_held_once_all_parts_were_taken() -> None:
    model = Gated(bias=True).eval()
    with torch.inference_mode():
        pack_linears(model, run=lambda: model(torch.randn(1, 2, 24)))
        rows = torch.randn(1, 3, 24)
        alive = weakref.ref(rows)
        model(rows)
        del rows
    assert alive() is None


@needs_kernels
def test_siblings_weights_are_freed_before_the_next_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Gated(bias=False)).eval()
    gated = model[0]
    assert isinstance(gated, Gated)
    alive = [weakref.ref(layer) for layer in (gated.gate, gated.up, gated.scale)]
    seen: list[int] = []
    kernels = packed_linear.find_kernels()
    assert kernels is not None
    pack, multiply = kernels

    def counting(weight: torch.Tensor, num_rows: int) -> torch.Tensor:
        seen.append(sum(ref() is not None for ref in alive))
        return pack(weight, num_rows)

    monkeypatch.setattr(packed_linear, "find_kernels", lambda: (counting, multiply))
    assert pack_linears(model, run=lambda: model(torch.zeros(1, 2, 24))) == 4
    assert seen == [3, 0]  # the three together, then `down`


def test_subclasses_other_dtypes_and_hooked_layers_stay_as_they_are() -> None:
    hooked = nn.Linear(8, 8)
    hooked.register_forward_hook(lambda _module, _args, output: output + 1)
    model = nn.Sequential(Doubled(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16), hooked)
    before = list(model)
    assert pack_linears(model) == 0
    assert list(model) == before


def test_without_the_kernel_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = nn.Sequential(nn.Linear(8, 8))
    assert pack_linears(model) == 0
    assert type(model[0]) is nn.Linear


@needs_kernels
def test_a_kernel_that_answers_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A private name may change its meaning: the trial notices."""
    real = torch.ops.mkldnn._linear_pointwise.default
    other = SimpleNamespace(default=lambda *arguments: real(*arguments) + 1)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", other)
    assert packed_linear.find_kernels() is None
