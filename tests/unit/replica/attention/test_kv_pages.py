"""Pages: where a token's K and V go, what an opened block holds, how many blocks fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from replica.attention import kv_pages
from replica.attention.gather_sdpa import GatherSdpa
from replica.attention.kv_pages import ATTRIBUTE, KVPages, LayerPages, LayerShape
from tests.fakes.steps import CPU, layer_pages, scheduled, step


def rows(*values: float) -> torch.Tensor:
    """(tokens, 2 heads, 8) with one number per token."""
    return torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, 2, 8).contiguous()


def test_a_token_lands_in_its_slot() -> None:
    pages = layer_pages()
    batch = step(scheduled("s", [5, 2], 2, 4))
    pages.write(batch, rows(1, 2, 3, 4), rows(5, 6, 7, 8))
    assert pages.keys[5, 2:, 0, 0].tolist() == [1, 2]
    assert pages.keys[2, :2, 1, 7].tolist() == [3, 4]
    assert pages.values[2, :2, 1, 7].tolist() == [7, 8]


def test_the_rest_of_an_opened_block_is_zero_and_nothing_else_is_touched() -> None:
    """A masked NaN is still a NaN: what a failed request left must not reach the block's next owner."""
    pages = layer_pages()
    pages.write(step(scheduled("s", [5, 2], 2, 4)), rows(1, 2, 3, 4), rows(1, 2, 3, 4))
    assert pages.keys[2, 2:].eq(0).all()
    assert pages.values[2, 2:].eq(0).all()
    assert pages.keys[5, :2].isnan().all()  # written before, or by whoever shares it: not ours to clear
    others = [block for block in range(16) if block not in (2, 5)]
    assert pages.keys[others].isnan().all()


def test_a_block_opened_in_an_earlier_step_keeps_its_tokens() -> None:
    pages = layer_pages()
    pages.write(step(scheduled("s", [3], 0, 2)), rows(1, 2), rows(1, 2))
    pages.write(step(scheduled("s", [3], 2, 1)), rows(9), rows(9))
    assert pages.keys[3, :, 0, 0].tolist() == [1, 2, 9, 0]


def test_pages_hang_on_the_modules_and_come_off_again() -> None:
    modules = [nn.Linear(1, 1), nn.Linear(1, 1)]
    shapes = [LayerShape(2, 8, 8), LayerShape(1, 4, 6)]
    pages = KVPages(
        modules,
        shapes,
        num_blocks=3,
        block_size=4,
        dtype=torch.bfloat16,
        device=CPU,
        backend=GatherSdpa(CPU),
    )
    hung: list[LayerPages] = [module.__dict__[ATTRIBUTE] for module in modules]
    assert [tuple(layer.keys.shape) for layer in hung] == [(3, 4, 2, 8), (3, 4, 1, 4)]
    assert hung[1].values.shape == (3, 4, 1, 6)
    assert all(layer.owner is pages and layer.keys.dtype == torch.bfloat16 for layer in hung)
    assert not any(list(module.buffers()) for module in modules)  # they are no part of the model's state
    pages.detach()
    pages.detach()
    assert not any(ATTRIBUTE in module.__dict__ for module in modules)


def test_a_blocks_bytes_are_those_of_all_layers() -> None:
    shapes = [LayerShape(2, 8, 8), LayerShape(1, 4, 6)]
    per_token = (2 * 16 + 1 * 10) * 4
    assert kv_pages.bytes_per_block(shapes, 16, torch.float32) == 16 * per_token
    allocated = [LayerPages(None, shape, 7, 16, torch.float32, CPU) for shape in shapes]  # type: ignore[arg-type]
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in allocated) == 7 * 16 * per_token


@pytest.mark.parametrize(
    ("free", "fraction", "block_bytes", "device", "blocks"),
    [
        (1000, 0.5, 100, "cpu", 5),
        (1099, 0.5, 100, "cpu", 5),
        (100, 0.5, 100, "cpu", 0),
        (1 << 50, 0.9, 1, "cpu", kv_pages.MAX_AUTO_BLOCKS_CPU),
        (1 << 30, 0.5, 1, "cuda", 1 << 29),
    ],
)
def test_blocks_are_the_share_of_memory_that_was_allowed(
    free: int, fraction: float, block_bytes: int, device: str, blocks: int
) -> None:
    assert kv_pages.blocks_from_memory(free, fraction, block_bytes, torch.device(device)) == blocks


def test_free_bytes_on_cpu_are_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pages, "free_host_bytes", lambda: 12345)
    assert kv_pages.free_bytes(CPU) == 12345


GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "reserved", "share", "left"),
    [
        (78, 0, 1.0, 78),
        (78, 0, 0.5, 40),  # whoever starts first leaves the other's half alone
        (70, 10, 0.5, 30),  # its own weights are part of its half
        (12, 10, 0.5, 12),  # somebody takes more than is his: no more than there is
        (60, 50, 0.5, 0),
    ],
)
def test_a_part_of_a_card_does_not_depend_on_who_starts_first(
    free: int, reserved: int, share: float, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: reserved * GIB)
    assert kv_pages.free_share_bytes(torch.device("cuda", 0), share) == left * GIB


def test_a_cpu_has_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pages, "free_host_bytes", lambda: 12345)
    assert kv_pages.free_share_bytes(CPU, 0.5) == 12345
