"""What a card says of itself after an error, by what torch says for it."""

from __future__ import annotations

import pytest
import torch

from replica.runners.lost_card import is_lost

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (None, False),  # what failed was not the card
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
    ],
    ids=str,
)
def test_a_card_that_answers_nothing_any_more_is_lost(
    said: Exception | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def synchronize(device: torch.device) -> None:
        asked.append(device)
        if said is not None:
            raise said

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert is_lost(CUDA) == expected
    assert asked == [CUDA]


def test_a_cpu_is_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "synchronize")
    assert not is_lost(torch.device("cpu"))
