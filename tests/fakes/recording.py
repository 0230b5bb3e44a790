"""A recorder of torch operations for the CPU, and an attention backend whose steps it can record.

Replaying runs the recorded operations again over the tensors they were recorded with, as a CUDA graph does:
whatever the program computed on its way to them, lengths and tables in lists above all, stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from replica.attention.backend import AttentionCall
from replica.attention.gather_sdpa import GatherSdpa
from replica.attention.kv_pages import LayerPages
from replica.attention.step_batch import StepBatch
from replica.attention.step_tables import NUMBERS_PER_SPAN, StepTables


class OperationRecorder:
    """`Recorder` over torch's operations."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.names: list[str] = []  # of the operations recorded last, kernels left out
        self.active: _Recording | None = None  # while something is recorded

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        recording = self.active = _Recording()
        try:
            with recording:
                work()
        finally:
            self.active = None
        self.num_recorded += 1
        self.names = recording.names()
        return recording.replay


class KernelRecorder(OperationRecorder):
    """Over kernels, too, that are launched by `kernel[grid](...)`: grid and numbers stay as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.num_launches = 0

    def over(self, kernels: Any, *names: str) -> Any:
        """Like the module `kernels`, with these of them recorded."""
        return SimpleNamespace(**{name: _RecordedKernel(self, getattr(kernels, name)) for name in names})

    def record_all(self, patch: pytest.MonkeyPatch, kernels: Any, *names: str) -> None:
        """These kernels of a module, recorded whoever launches them."""
        for name in names:
            patch.setattr(kernels, name, _RecordedKernel(self, getattr(kernels, name)))


class _RecordedKernel:
    def __init__(self, recorder: KernelRecorder, kernel: Any) -> None:
        self._recorder, self._kernel = recorder, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self._recorder.num_launches += 1
            active = self._recorder.active
            if active is None:
                self._kernel[grid](*args, **kwargs)
            else:
                active.launch(self._kernel[grid], args, kwargs)

        return launch


class FailingRecorder:
    """One whose forward waits for the device on the way, as some families' do; after some that did not.

    error: raised in place of what CUDA says then.
    """

    def __init__(self, successes: int = 0, error: RuntimeError | None = None) -> None:
        self._successes = successes
        self._recorder = OperationRecorder()
        self._error = error or RuntimeError("operation not permitted when stream is capturing")

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        if self._recorder.num_recorded < self._successes:
            return self._recorder.record(work)
        work()
        raise self._error


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._in_kernel = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._in_kernel:  # an interpreter's own
            return func(*args, **(kwargs or {}))
        assert "_local_scalar_dense" not in str(func), "a number was read back while recording"
        out = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, out))
        return out

    def launch(self, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a kernel, and again at every replay."""
        self._in_kernel = True
        try:
            kernel(*args, **kwargs)
        finally:
            self._in_kernel = False
        self._operations.append((kernel, args, kwargs, None))

    def names(self) -> list[str]:
        return [
            func.overloadpacket.__name__
            for func, *_ in self._operations
            if isinstance(func, torch._ops.OpOverload)
        ]

    def replay(self) -> None:
        for func, args, kwargs, out in self._operations:
            again = func(*args, **kwargs)
            for before, now in zip(_tensors(out), _tensors(again), strict=True):
                if before.data_ptr() != now.data_ptr():  # else a view, or computed in place
                    before.copy_(now)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return (
        [each for each in value if isinstance(each, torch.Tensor)] if isinstance(value, (list, tuple)) else []
    )


class TabledAttention:
    """`HoldingBackend`: held steps from their tables alone, in fixed shapes; others as gather + SDPA."""

    name = "tabled"

    def __init__(self, device: torch.device) -> None:
        self._other = GatherSdpa(device)
        self.held: dict[StepBatch, StepTables] = {}
        self._device = device

    def close(self) -> None:
        self._other.close()
        self.held.clear()

    def hold(self, batch: StepBatch) -> StepTables:
        tables = self.held[batch] = StepTables(batch, self._device)
        return tables

    def release(self, batch: StepBatch) -> None:
        self.held.pop(batch, None)

    def attend(self, pages: LayerPages, batch: StepBatch, call: AttentionCall) -> torch.Tensor:
        tables = self.held.get(batch)
        if tables is None:
            return self._other.attend(pages, batch, call)
        spans = tables.spans.view(-1, NUMBERS_PER_SPAN).long()
        num_rows, size = len(spans), batch.block_size
        starts, entries = spans[:, 2], spans[:, 3]
        room = len(tables.tables) // num_rows
        blocks = tables.tables.long()[entries[:, None] + torch.arange(room)]
        slots = (blocks[:, :, None] * size + torch.arange(size)).flatten(1)
        positions = torch.arange(room * size)
        is_seen = positions <= starts[:, None]
        if call.window is not None:
            is_seen = is_seen & (positions > starts[:, None] - call.window)
        keys, values = (
            torch.where(is_seen[:, :, None, None], part[slots], 0.0).transpose(1, 2)
            for part in (pages.key_slots, pages.value_slots)
        )  # (rows, kv_heads, room * size, dim); what nobody wrote may be NaN
        heads, _, key_dim = call.query.shape
        query = call.query.transpose(0, 1).reshape(num_rows, keys.shape[1], -1, key_dim)
        scores = (query @ keys.transpose(2, 3)) * call.scale
        weights = scores.masked_fill(~is_seen[:, None, None], float("-inf")).softmax(-1)
        return (weights @ values).reshape(num_rows, heads, values.shape[3])
