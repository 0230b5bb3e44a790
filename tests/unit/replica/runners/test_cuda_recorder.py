"""Where recording fails, nothing of it is left: by torch's calls, which stand-ins answer as torch does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from replica.runners import decode_graphs
from replica.runners.decode_graphs import CudaRecorder


class Card:
    """In the place of `torch.cuda`. Its numbers are waited for by `read`."""

    def __init__(self) -> None:
        self.current: object = "the thread's own"
        self.sync_debug_mode: int | str = 0
        self.is_capturing = False
        self.captures = 0
        self.waits: list[object] = []  # of the thread's own stream, for others

    def read(self) -> None:
        if self.sync_debug_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    def Stream(self, _device: object) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda _: None)

    def current_stream(self, _device: object) -> object:
        return SimpleNamespace(name=self.current, wait_stream=self.waits.append)

    def set_stream(self, stream: SimpleNamespace) -> None:
        self.current = stream.name

    def get_sync_debug_mode(self) -> int | str:
        return self.sync_debug_mode

    def set_sync_debug_mode(self, mode: int | str) -> None:
        """With torch's warning, which is an error where warnings are."""
        if mode:
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)
        self.sync_debug_mode = mode

    def graph_pool_handle(self) -> object:
        return object()

    def CUDAGraph(self) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: None)

    @contextmanager
    def device(self, _device: object) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, _stream: object) -> Iterator[None]:
        before, self.current = self.current, "the recorder's"
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, _graph: object, **_: object) -> Iterator[None]:
        """Whose end raises after work that raised, before it puts the stream back (torch 2.11 and 2.13)."""
        before, self.current = self.current, "the recorder's"
        self.captures += 1
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False
        self.current = before


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    stand_in = SimpleNamespace(cuda=made, Tensor=torch.Tensor, device=torch.device)
    monkeypatch.setattr(decode_graphs, "torch", stand_in)
    return made


def test_what_waits_for_the_card_is_found_before_anything_is_recorded(card: Card) -> None:
    with pytest.raises(RuntimeError, match="synchronizing"):
        CudaRecorder(torch.device("cuda", 0)).record(card.read)
    assert card.captures == 0
    assert card.sync_debug_mode == 0
    assert card.current == "the thread's own"


@pytest.mark.parametrize("runs", [0, 1], ids=["at once", "when it is looked at"])
def test_what_was_begun_before_it_raises_is_waited_for(card: Card, runs: int) -> None:
    """The tensors it reads are let go then, and their memory is the thread's own stream's again."""
    left = iter(range(runs))

    def work() -> None:
        if next(left, None) is None:
            raise RuntimeError("out of memory")

    recorder = CudaRecorder(torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="memory"):
        recorder.record(work)
    assert card.waits == [recorder._stream]


def test_a_recording_that_fails_leaves_the_thread_its_stream(card: Card) -> None:
    def work() -> None:
        if card.is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="capturing"):
        CudaRecorder(torch.device("cuda", 0)).record(work)
    assert card.captures == 1
    assert card.current == "the thread's own"


def test_it_is_looked_at_once(card: Card) -> None:
    recorder, modes = CudaRecorder(torch.device("cuda", 0)), []
    for _ in range(2):
        recorder.record(lambda: modes.append(card.sync_debug_mode))
    assert modes == [0, "error", 0, 0, 0]
    assert card.captures == 2
