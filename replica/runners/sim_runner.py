"""A runner without a model: modelled step time, deterministic tokens, faults on demand.

Its K/V pages hold one number per slot, a rolling hash of all tokens up to there, read back through
block tables exactly as attention would read keys. So a token is a pure function of the whole context,
and a cache that hands out a wrong, stale or never computed block changes the output, as it would
with a real model. Knows no torch and no text.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from cache.host_tier import BlockMoves
from cache.messages import SamplingParams
from replica.config import SimConfig, num_host_blocks
from replica.scheduling.runner import CopyTime, LaunchedStep, RunnerInfo, ScheduledSequence, StepResult
from replica.scheduling.step_time import step_work
from replica.structures.matcher import StructureMatcher

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: odd, so that multiplying loses nothing
_START = 0x243F6A8885A308D3  # the context of a sequence's first token: digits of pi


class SimulatedFault(RuntimeError):
    """The forward failed because the configuration asked for it."""


class SimRunner:
    """`Runner` whose steps take as long as `SimConfig` says, by a `sleep` that tests replace."""

    def __init__(
        self,
        config: SimConfig,
        *,
        block_size: int,
        sleep: Callable[[float], None] = time.sleep,
        eos_token_ids: frozenset[int] = frozenset(),
        hang: Callable[[], None] | None = None,
        clock: Callable[[], float] | None = None,
        host_cache_gib: float = 0.0,
        num_layers: int = 1,
    ) -> None:
        """hang: what a hanging step does; by default it never returns.
        clock: a step that took longer by it than modelled, as on a machine slowed from outside, says so.
        None: every step takes what the model says.
        """
        self._config = config
        self._block_size = block_size
        self._sleep = sleep
        self._hang = hang if hang is not None else _hang_forever
        self._clock = clock if clock is not None else _never_late
        self._step_time = config.step_time
        self._num_steps = 0
        self._tells_time = clock is not None
        self._slept_s = 0.0  # a clock of its own, where it was given none
        self._free_s = 0.0  # when the last step that was launched is done, by `_now`
        self._pages = array("Q", bytes(8 * config.num_blocks * block_size))
        num_slots = num_host_blocks(host_cache_gib, 8 * block_size)
        self._host_pages = array("Q", bytes(8 * num_slots * block_size))
        self._info = RunnerInfo(
            device="simulated",
            attention_backend="simulated",
            kv_dtype="simulated",
            num_blocks=config.num_blocks,
            block_size=block_size,
            kv_bytes_per_block=8 * block_size,
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            eos_token_ids=eos_token_ids,
            num_host_blocks=num_slots,
            has_logits=False,
            num_layers=num_layers,
        )

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def execute(self, sequences: list[ScheduledSequence]) -> StepResult:
        self._num_steps += 1
        modelled_s, began_s = self._step_time.step_s(*step_work(sequences)), self._clock()
        self._sleep(modelled_s)
        self._inject_faults(self._num_steps)
        tokens = self._draw_all(sequences)
        return StepResult(next_tokens=tokens, elapsed_s=max(modelled_s, self._clock() - began_s))

    def launch(
        self, sequences: Sequence[ScheduledSequence], before: LaunchedStep | None = None
    ) -> LaunchedStep:
        """The machine takes its time while the program goes on; its tokens are there at once, and told when
        they would be."""
        assert before is None or isinstance(before, _SimStep)
        self._num_steps += 1
        modelled_s = self._step_time.step_s(*step_work(sequences))
        began_s = max(self._now(), self._free_s)
        self._free_s = began_s + modelled_s
        step = _SimStep(self, self._num_steps, began_s, self._free_s)
        if before is not None and before.failure is not None:
            step.failure = before.failure
            return step
        try:
            step.tokens = self._draw_all(sequences, before.tokens if before is not None else ())
        except Exception as error:
            step.failure = error
        return step

    def finish(self, step: _SimStep) -> StepResult:
        """Wait for a step that was launched. Raises what it failed with."""
        self._sleep_until(step.done_s)
        self._inject_faults(step.number)
        if step.failure is not None:
            raise step.failure
        return StepResult(step.tokens, elapsed_s=max(step.done_s, self._now()) - step.began_s)

    def copy_blocks(self, moves: BlockMoves) -> Sequence[CopyTime]:
        """All copies of one direction at once; they take what the configuration says."""
        size, pages, host = self._block_size, self._pages, self._host_pages
        for block_id, slot in moves.saves:
            host[slot * size : (slot + 1) * size] = pages[block_id * size : (block_id + 1) * size]
        for slot, block_id in moves.loads:
            pages[block_id * size : (block_id + 1) * size] = host[slot * size : (slot + 1) * size]
        times = []
        for is_load, part in ((False, moves.saves), (True, moves.loads)):
            if part:
                elapsed_s = len(part) * self._config.copy_block_s * self._config.slowdown
                self._sleep(elapsed_s)
                times.append(CopyTime(is_load, len(part), elapsed_s))
        return times

    def warm_up(self) -> float:
        """Nothing to load or compile."""
        return 0.0

    def close(self) -> None:
        """Nothing to give back."""

    def _now(self) -> float:
        return self._clock() if self._tells_time else self._slept_s

    def _sleep_until(self, time_s: float) -> None:
        wait_s = time_s - self._now()
        if wait_s > 0:
            self._slept_s += wait_s
            self._sleep(wait_s)

    def _inject_faults(self, number: int) -> None:
        config = self._config
        if config.hang_after_steps is not None and number > config.hang_after_steps:
            self._hang()
        if config.raise_every_steps is not None and number % config.raise_every_steps == 0:
            raise SimulatedFault(f"step {number} was told to fail")

    def _draw_all(
        self, sequences: Sequence[ScheduledSequence], drawn: Sequence[int | None] = ()
    ) -> tuple[int | None, ...]:
        """drawn: the tokens of the step before, for those that wait for one of them."""
        for sequence in sequences:
            self._copy_block(sequence)
        # In the order given: a sequence may read blocks that an earlier one fills in this very step.
        return tuple([self._compute(sequence, drawn) for sequence in sequences])

    def _copy_block(self, sequence: ScheduledSequence) -> None:
        """Nothing but what lies before `start`: the rest of the source is somebody else's."""
        if sequence.copy_source is not None:
            size, count = self._block_size, sequence.start % self._block_size
            source, target = sequence.copy_source * size, sequence.block_table[sequence.start // size] * size
            self._pages[target : target + count] = self._pages[source : source + count]

    def _compute(self, sequence: ScheduledSequence, drawn: Sequence[int | None]) -> int | None:
        """Write the new tokens' pages, if they are through all layers; the next token if the step reaches the
        last one."""
        if sequence.layers is not None and not sequence.layers.is_last:
            return None
        pages, size, table = self._pages, self._block_size, sequence.block_table
        start, end = sequence.start, sequence.start + sequence.num_new_tokens
        state = pages[table[(start - 1) // size] * size + (start - 1) % size] if start else _START
        tokens = sequence.token_ids[start:end]
        if sequence.drawn_by is not None:
            newest = drawn[sequence.drawn_by]
            assert newest is not None, "it waits for a token that is not drawn"
            tokens.append(newest)
        for position, token in zip(range(start, end), tokens, strict=True):
            state = _mix(state ^ token)
            pages[table[position // size] * size + position % size] = state
        if not sequence.samples:
            return None
        draw = _draw(state, sequence.sampling, sequence.seed)
        if sequence.structure is not None:
            return _allowed(sequence.structure, draw, self._config.vocab_size)
        return draw % self._config.vocab_size


class _SimStep:
    """A step that the machine has been given."""

    def __init__(self, runner: SimRunner, number: int, began_s: float, done_s: float) -> None:
        self._runner = runner
        self.number = number
        self.began_s, self.done_s = began_s, done_s  # by the runner's clock
        self.tokens: tuple[int | None, ...] = ()
        self.failure: Exception | None = None

    def result(self) -> StepResult:
        return self._runner.finish(self)


def _mix(value: int) -> int:
    value = (value * _MULTIPLIER + 1) & _MASK
    return value ^ (value >> 29)


def _draw(state: int, sampling: SamplingParams, seed: int) -> int:
    """Greedy depends on the context alone, sampling on the seed as well; the position is in the context."""
    noise = 0 if sampling.temperature == 0 else _mix(seed & _MASK)
    return _mix(state ^ noise) >> 11


def _allowed(structure: StructureMatcher, drawn: int, vocab_size: int) -> int:
    """One of the tokens that may come next."""
    words = np.zeros(structure.num_words, dtype=np.int32)
    structure.fill(words)
    allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size].nonzero()[0]
    return int(allowed[drawn % len(allowed)]) if len(allowed) else 0


def _never_late() -> float:
    return 0.0


def _hang_forever() -> None:
    threading.Event().wait()
