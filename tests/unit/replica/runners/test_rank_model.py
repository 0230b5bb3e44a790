"""Whether there is room for a model in parts, asked before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from replica.attention import kv_pages
from replica.models.model_source import NotEnoughMemory, ResolvedModel
from replica.runners import rank_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MIB = 1 << 20


@pytest.mark.parametrize(
    ("device", "free_mib", "told"),
    [
        (CPU, 4, None),
        (CPU, 3, r"needs 4\.0 MiB of memory on cpu for its weights, cut into 2 parts, 3\.0 MiB are free"),
        (CUDA, 2, None),  # the other part is on the other card
        (CUDA, 1, r"needs 2\.0 MiB of memory on cuda:0 for its weights, cut into 2 parts, 1\.0 MiB are free"),
    ],
)
def test_parts_must_fit_where_they_go(
    stored: ResolvedModel,
    device: torch.device,
    free_mib: int,
    told: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_pages, "free_bytes", lambda _device: free_mib * MIB)
    if told is None:
        rank_model.check_memory(stored, 2 * MIB, device, torch.float32, 2)
        return
    with pytest.raises(NotEnoughMemory, match=told):
        rank_model.check_memory(stored, 2 * MIB, device, torch.float32, 2)


def test_what_is_converted_is_whole_on_the_host_once_for_each_rank(
    stored: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_pages, "free_bytes", lambda _device: 100 * MIB)
    monkeypatch.setattr(rank_model, "free_host_bytes", lambda: 3 * MIB)
    rank_model.check_memory(stored, 2 * MIB, CUDA, torch.float32, 2)
    told = r"needs 4\.0 MiB of memory on the host for its weights as bfloat16, once for each of 2 ranks"
    with pytest.raises(NotEnoughMemory, match=told):
        rank_model.check_memory(stored, MIB, CUDA, torch.bfloat16, 2)
