"""How long a newcomer would wait: per replica until it can start there, and over a fleet with what is held.

A replica can start on new work when it has prefilled what is queued, and has a place and blocks for it. The
first is the backlog that the cost knows. The second decides where answers are long: with all places taken the
queue moves when sequences end, by Little's law every `residence / running` seconds, however short the
prompts in it are. Admission asks for both (`placement/admission.py`); the cost and late binding do not.

Knows numbers and replica states; knows neither requests, limits nor clocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.pricing.replica_load import ReplicaState

UNMEASURED_STEPS = 64  # full steps of queued tokens count as the longest wait while speeds are unknown
MEAN_OVER = 64  # requests, about, that the mean residence goes back


class Residence:
    """Seconds that sequences lately ran from their first token to their end."""

    def __init__(self) -> None:
        self.mean_s = 0.0  # 0 while none has ended
        self._num_seen = 0  # up to `MEAN_OVER`

    def observe(self, seconds: float) -> None:
        self._num_seen = min(self._num_seen + 1, MEAN_OVER)
        self.mean_s += (seconds - self.mean_s) / self._num_seen


def start_s(state: ReplicaState, now: float, *, residence_s: float, max_wait_s: float) -> float:
    """Seconds until that replica could start on a newcomer; 0: at once.

    max_wait_s: what `UNMEASURED_STEPS` full steps are taken for where nobody knows how long a step takes.
    """
    if state.step_time is not None:
        prefill_s = state.backlog_s(now)
    else:
        prefill_s = max_wait_s * state.queued_tokens / (UNMEASURED_STEPS * state.info.max_batched_tokens)
    return max(prefill_s, _place_s(state, residence_s))


def _place_s(state: ReplicaState, residence_s: float) -> float:
    """Seconds until enough sequences have ended for a newcomer to find a place and blocks."""
    load, info = state.load, state.info
    running, waiting = load.num_running, state.num_waiting
    if not running:
        return 0.0
    num_short = waiting + 1.0 - max(0, info.max_running - running)
    if waiting and load.total_blocks:
        # Of those that wait, what their prompts alone do not fit into.
        needed = state.queued_tokens / info.fingerprint.block_size
        if needed > load.free_blocks:
            num_short = max(num_short, waiting * (1.0 - load.free_blocks / needed))
    return max(0.0, num_short) * residence_s / running


def level_s(starts_s: Sequence[float], held_s: float) -> float:
    """Seconds until a fleet could start on a newcomer, when `held_s` of work goes before it.

    starts_s: of each replica, until it could start. What is held fills the shortest first, as water would.
    0 while one of them could start at once: whoever is held then holds out for another.
    """
    ordered = sorted(starts_s)
    if not ordered or ordered[0] <= 0.0:
        return 0.0
    below = held_s
    for number, each in enumerate(ordered, start=1):
        below += each
        if number == len(ordered) or below <= ordered[number] * number:
            return below / number
    raise AssertionError("the last level holds everything")
