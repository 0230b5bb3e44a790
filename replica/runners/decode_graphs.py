"""Decode steps recorded once per shape and replayed: the card is told one thing in place of a thousand.

A step of decodes alone is padded to the next of a few batch sizes and context lengths, and a forward over
tensors that stay where they are is recorded for each such shape: before anybody waits for it, or, of more
shapes than are kept, when it comes for the second time. A replay fills the tensors and starts the recording.

    row    0 .. n)       the step's sequences, in their own order
           n .. batch)   padding: one token each, in a block that nobody else has

Knows steps, pages and how a forward is called; what records and replays is given.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from cache.messages import SamplingParams
from cache.types import RequestId
from replica.attention.backend import HeldStep, HoldingBackend
from replica.attention.step_batch import PlacedSequence, StepBatch
from replica.device_errors import is_out_of_memory
from replica.scheduling.runner import ScheduledSequence
from replica.transfer import to_device

logger = logging.getLogger(__name__)

SHORTEST = 512  # tokens of context; each further length is twice as long
# Recordings: the oldest unused one goes first. All shapes of 64 sequences of up to 32,768 tokens are 9 batch
# sizes times 7 lengths, 63: with fewer kept a changing load would record over and over. A few MB each.
MAX_KEPT = 64
PADDING = RequestId("padding")

Forward = Callable[[StepBatch], torch.Tensor]
Replay = Callable[[], None]
Drawn = tuple[list[int], torch.Tensor]


class Recorder(Protocol):
    """Runs work once and can then run it again, over the same tensors."""

    def record(self, work: Callable[[], None]) -> Replay:
        """May run `work` more than once. Raises RuntimeError where it cannot be recorded."""


class CudaRecorder:
    """By CUDA graphs. They share one pool of memory: only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._is_known_not_to_wait = False

    def record(self, work: Callable[[], None]) -> Replay:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()  # compiles and loads whatever is not there yet, which must not happen while recording
                if not self._is_known_not_to_wait:
                    self._look_whether_it_waits(work)
        finally:
            # Also where it raises: the card may still be at work, on memory that is then given to others.
            current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.cuda.device(self._device),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream),
            ):
                work()
        finally:
            # Where recording fails torch leaves its stream the thread's current one.
            torch.cuda.set_stream(current)
        return graph.replay

    def _look_whether_it_waits(self, work: Callable[[], None]) -> None:
        """Raises RuntimeError where `work` waits for the card, or copies what it would have to wait for.

        Recording finds that out, too, and leaves torch's allocator in the middle of it: for the rest of the
        process what is cached would not be given back where memory runs out.
        """
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it does not find everything yet: then recording does
            torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
        self._is_known_not_to_wait = True


@dataclass(frozen=True, slots=True)
class _Recording:
    batch: StepBatch  # whose tensors the recording reads
    step: HeldStep
    replay: Replay


class DecodeGraphs:
    """One runner's recordings. Engine thread only."""

    def __init__(
        self,
        forward: Forward,
        backend: HoldingBackend,
        recorder: Recorder,
        *,
        block_size: int,
        spare_block: int,
        max_batch: int,
        max_length: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """forward: logits of each sequence's last row, (sequences, vocabulary), without waiting for the card.

        spare_block: in the pages, and in nobody's table. max_length: tokens of the longest sequence.
        """
        self._forward, self._backend, self._recorder = forward, backend, recorder
        self._block_size, self._spare_block = block_size, spare_block
        self._device, self._dtype = device, dtype
        self._batches = batch_sizes(max_batch)
        self._lengths = lengths(max_length, block_size)
        self._logits: torch.Tensor | None = None  # where every recording leaves them
        self._recordings: OrderedDict[tuple[int, int], _Recording] = OrderedDict()
        self._seen: set[tuple[int, int]] = set()
        self._refusal: str | None = None
        self._is_full = False  # the device: once memory ran out nothing more is recorded
        self.num_replays = 0

    def record_ahead(self) -> None:
        """Record every shape that is kept, short ones first: whoever met one later would wait. Seconds.

        Stops where the forward turns out not to be one that can be recorded, or memory runs out.
        """
        shapes = ((batch, length) for length in self._lengths for batch in self._batches)
        for shape in itertools.islice(shapes, MAX_KEPT):
            if self._recording_of(shape) is None:
                return
            self._seen.add(shape)

    def give_back(self) -> bool:
        """Let the newer half of the recordings go, since others lack memory, and record no more.

        False, and nothing has changed, if there are none.
        """
        if not self._recordings:
            return False
        self._is_full = True
        for _ in range(-(-len(self._recordings) // 2)):
            _, newest = self._recordings.popitem()
            self._backend.release(newest.batch)
        logger.warning(
            "a full step had no memory beside the recorded decode steps; the longer ones run as they are",
            extra={"recorded": len(self._recordings)},
        )
        return True

    def suits(self, sequences: Sequence[ScheduledSequence]) -> bool:
        """Whether this step is one to be replayed, now; remembers that its shape came."""
        shape = self._shape_of(sequences)
        if shape is None or self._refusal is not None:
            return False
        has_come = shape in self._seen
        self._seen.add(shape)
        return has_come

    def logits(
        self, sequences: Sequence[ScheduledSequence], drawn: Drawn | None = None
    ) -> torch.Tensor | None:
        """(sequences, vocabulary), in the order given; good until the next call. Only after `suits`.

        drawn: rows whose tokens only the device knows yet, and those tokens.
        None where it has to run as it is: there is no memory to record this shape, or the forward turned out
        not to be one that can be recorded, and then it is None for every step from now on.
        """
        shape = self._shape_of(sequences)
        assert shape is not None
        recording = self._recording_of(shape)
        if recording is None:
            return None
        self._recordings.move_to_end(shape)
        self._fill(recording, sequences)
        if drawn is not None:
            recording.batch.put_tokens(*drawn)
        recording.replay()
        self.num_replays += 1
        assert self._logits is not None
        return self._logits[: len(sequences)]

    def close(self) -> None:
        """Let the recordings go, before the memory they read. Idempotent."""
        self._let_go()
        self._logits = None

    # -- parts of the above -----------------------------------------------------------------------

    def _recording_of(self, shape: tuple[int, int]) -> _Recording | None:
        """Made now, where there is none. None as `logits`."""
        recording = self._recordings.get(shape)
        if recording is not None or self._refusal is not None or self._is_full:
            return recording
        try:
            return self._record(shape)
        except RuntimeError as error:
            # Ending a recording in which memory ran out may raise an error of its own, which hides that one.
            if any(is_out_of_memory(each) for each in (error, error.__context__) if each is not None):
                # The step itself may fit: it is to be tried as it is before anybody makes it smaller.
                self._is_full = True
                logger.warning(
                    "no memory to record more decode steps; the others run as they are",
                    extra={"recorded": len(self._recordings)},
                )
                return None
            self._refusal = f"{type(error).__name__}: {error}"
            self._let_go()
            logger.warning("decode steps cannot be recorded; they run as they are", exc_info=error)
            return None

    def _let_go(self) -> None:
        for recording in self._recordings.values():
            self._backend.release(recording.batch)
        self._recordings.clear()

    def _shape_of(self, sequences: Sequence[ScheduledSequence]) -> tuple[int, int] | None:
        """The batch and length it is padded to; None for a step that is not decodes alone, or too large."""
        if not sequences or len(sequences) > self._batches[-1]:
            return None
        if any(each.num_new_tokens != 1 for each in sequences):
            return None
        longest = max(each.start for each in sequences) + 1
        if longest > self._lengths[-1]:
            return None
        batch = self._batches[bisect_left(self._batches, len(sequences))]
        return batch, self._lengths[bisect_left(self._lengths, longest)]

    def _record(self, shape: tuple[int, int]) -> _Recording:
        batch, length = shape
        while len(self._recordings) >= MAX_KEPT:
            _, oldest = self._recordings.popitem(last=False)
            self._backend.release(oldest.batch)
        held = StepBatch([self._longest(length)] * batch, self._block_size, self._device, self._dtype)
        assert held.opened_blocks is None, "a length is a multiple of the block size"
        step = self._backend.hold(held)

        def work() -> None:
            logits = self._forward(held)
            if self._logits is None:
                self._logits = logits.new_empty(self._batches[-1], logits.shape[1])
            self._logits[:batch].copy_(logits)

        # While it is recorded every row is padding: only the spare block is written.
        self._fill_all(held, step, [self._padding(row) for row in range(batch)], [0] * batch)
        try:
            replay = self._recorder.record(work)
        except BaseException:
            self._backend.release(held)
            raise
        recording = self._recordings[shape] = _Recording(held, step, replay)
        logger.info("decode step recorded", extra={"batch": batch, "length": length})
        return recording

    def _fill(self, recording: _Recording, sequences: Sequence[ScheduledSequence]) -> None:
        placed = [
            PlacedSequence(each.request_id, each.start, 1, row, each.block_table)
            for row, each in enumerate(sequences)
        ]
        tokens = [each.token_ids[each.start] if each.drawn_by is None else 0 for each in sequences]
        missing = recording.batch.num_tokens - len(placed)
        placed += [self._padding(len(sequences) + index) for index in range(missing)]
        self._fill_all(recording.batch, recording.step, placed, tokens + [0] * missing)

    def _fill_all(
        self, held: StepBatch, step: HeldStep, placed: list[PlacedSequence], tokens: list[int]
    ) -> None:
        size = self._block_size
        packed = np.empty((3, len(placed)), dtype=np.int64)
        packed[0] = tokens
        packed[1] = [each.start for each in placed]
        packed[2] = [each.block_table[each.start // size] * size + each.start % size for each in placed]
        held.refill(to_device(packed, self._device))
        step.refill(placed)

    def _padding(self, row: int) -> PlacedSequence:
        return PlacedSequence(PADDING, 0, 1, row, [self._spare_block])

    def _longest(self, length: int) -> ScheduledSequence:
        """As long as any sequence of its shape: what a recording is cut out for."""
        return ScheduledSequence(
            request_id=PADDING,
            token_ids=array("i", bytes(4 * length)),
            block_table=[self._spare_block] * (length // self._block_size),
            start=length - 1,
            num_new_tokens=1,
            num_prompt_tokens=length,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            seed=0,
        )


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... up to `most`: from 16 on less than a third is padding."""
    sizes, size = [1, 2, 4], 8
    while size < most:
        sizes += [size] if size < 16 else [size, size + size // 2]
        size *= 2
    return [*(each for each in sizes if each < most), most]


def lengths(most: int, block_size: int) -> list[int]:
    """Doubling from `SHORTEST` to `most`, each rounded up to whole blocks."""
    found = [SHORTEST]
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return sorted({-(-min(each, most) // block_size) * block_size for each in found})
