"""What happened to each request, written down as it happens. Knows times and counts; computes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadtest.simulation.cell import CellResult
from loadtest.simulation.engine import SimEngine
from loadtest.simulation.turns import Turn


class Recorder:
    def __init__(self, turns: Sequence[Turn]) -> None:
        self.num_left = len(turns)  # requests whose last token has not come
        self._turns = turns
        self._ttft_s = [0.0] * len(turns)
        self._e2e_s = [0.0] * len(turns)
        self._cached = [0] * len(turns)
        self._replica = [-1] * len(turns)

    def first_token(self, turn: Turn, at_s: float, replica: int, cached_tokens: int) -> None:
        """Once per request: an answer begun and cut off goes on elsewhere with its second token."""
        index = turn.index
        assert self._replica[index] < 0, f"request {index} got two first tokens"
        self._ttft_s[index] = at_s - turn.work.arrival_s
        self._cached[index] = cached_tokens
        self._replica[index] = replica

    def finished(self, turn: Turn, at_s: float) -> None:
        self._e2e_s[turn.index] = at_s - turn.work.arrival_s
        self.num_left -= 1

    def result(
        self, engines: Sequence[SimEngine], *, num_events: int, num_retries: int, load_1_rate_per_s: float
    ) -> CellResult:
        assert self.num_left == 0, "the simulation ended before its requests"
        works = [turn.work for turn in self._turns]
        return CellResult(
            arrival_s=np.array([work.arrival_s for work in works], dtype=np.float64),
            ttft_s=np.array(self._ttft_s, dtype=np.float64),
            e2e_s=np.array(self._e2e_s, dtype=np.float64),
            input_tokens=np.array([work.input_tokens for work in works], dtype=np.int64),
            output_tokens=np.array([work.output_tokens for work in works], dtype=np.int64),
            cached_tokens=np.array(self._cached, dtype=np.int64),
            replica=np.array(self._replica, dtype=np.int64),
            busy_s=np.array([engine.busy_s for engine in engines], dtype=np.float64),
            prefill_tokens=np.array([engine.prefill_tokens for engine in engines], dtype=np.int64),
            num_events=num_events,
            num_preemptions=sum(engine.scheduler.num_preemptions for engine in engines),
            num_retries=num_retries,
            load_1_rate_per_s=load_1_rate_per_s,
        )
