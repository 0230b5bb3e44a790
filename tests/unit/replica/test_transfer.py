"""Copies that a card makes by itself, found out without one: from locked memory, and back into it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from replica import transfer
from replica.transfer import ToHost, to_device

CUDA = torch.device("cuda", 0)


class Copied:
    """A tensor that only notes what is done with it."""

    device, shape, dtype = CUDA, (2,), torch.int64

    def __init__(self, done: list[Any]) -> None:
        self._done = done

    def pin_memory(self) -> Copied:
        self._done.append("locked")
        return self

    def to(self, device: torch.device, *, non_blocking: bool) -> Copied:
        self._done.append((str(device), non_blocking))
        return self

    def copy_(self, _source: Any, *, non_blocking: bool) -> None:
        self._done.append(("back", non_blocking))


class Events:
    """In the place of `torch.cuda`: one stream, and events that note when they are waited for."""

    def __init__(self, done: list[Any]) -> None:
        self._done = done

    def current_stream(self, device: torch.device) -> str:
        return f"stream of {device}"

    def Event(self) -> Events:
        return self

    def record(self, stream: str) -> None:
        self._done.append(stream)

    def synchronize(self) -> None:
        self._done.append("waited")


def test_a_card_is_given_locked_memory_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(torch, "from_numpy", lambda _array: Copied(done))
    to_device(np.array([1, 2]), CUDA)
    assert done == ["locked", ("cuda:0", True)]


def test_on_a_cpu_it_is_the_same_memory() -> None:
    array = np.array([1, 2])
    tensor = to_device(array, torch.device("cpu"))
    array[0] = 3
    assert tensor.tolist() == [3, 2]
    assert ToHost(tensor).take() is tensor


def test_what_comes_back_is_waited_for_when_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def empty(_shape: Any, *, dtype: torch.dtype, pin_memory: bool) -> Copied:
        done.append(("empty", dtype, pin_memory))
        return Copied(done)

    monkeypatch.setattr(transfer, "_cuda", Events(done))
    monkeypatch.setattr(torch, "empty", empty)
    coming: Any = Copied(done)
    back = ToHost(coming)
    assert done == [("empty", torch.int64, True), ("back", True), "stream of cuda:0"]
    back.take()
    assert done[3:] == ["waited"]
