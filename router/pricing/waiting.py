"""How long a newcomer would wait: per replica until it can start there, and over a fleet with what is held.

A replica can start on new work when it has prefilled what is queued and has a place, which is its backlog,
and when it has blocks. Admission asks for all of it (`placement/admission.py`); cost and late binding ask for
the backlog alone: memory is in the cost by another term.

Knows numbers and replica states; knows neither requests, limits nor clocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.pricing.replica_state import ReplicaState
from router.pricing.residence import Residence

# While no step time is known, for some two dozen steps, so many full ones of queued tokens count as the
# longest wait: a first burst of long prompts must not be refused.
UNMEASURED_STEPS = 256


def start_s(state: ReplicaState, now: float, residence: Residence, *, max_wait_s: float) -> float:
    """Seconds until that replica could start on a newcomer; 0: at once.

    max_wait_s: what `UNMEASURED_STEPS` full steps are taken for where nobody knows how long a step takes.
    """
    backlog_s = state.backlog_s(now)
    if state.step_time is None:
        full_steps = state.queued_tokens / state.info.max_batched_tokens
        backlog_s = max(backlog_s, max_wait_s * full_steps / UNMEASURED_STEPS)
    return max(backlog_s, _blocks_s(state, residence))


def _blocks_s(state: ReplicaState, residence: Residence) -> float:
    """Seconds until the prompts that wait fit into blocks: of those that do not, as many have to end.

    Free blocks into which running answers will grow are not for them: the engine lets nobody in there.
    """
    load, num_waiting = state.load, state.num_waiting
    needed = state.queued_tokens / state.info.fingerprint.block_size
    room = max(0, load.free_blocks - load.growth_blocks)
    if not num_waiting or not load.total_blocks or needed <= room:
        return 0.0
    return state.slowness * residence.until_ended_s(num_waiting * (1.0 - room / needed), load.num_running)


def level_s(starts_s: Sequence[float], held_s: float) -> float:
    """Seconds until a fleet could start on a newcomer, when `held_s` of work goes before it.

    starts_s: of each replica, until it could start. What is held fills the shortest first, as water would.
    """
    ordered = sorted(starts_s)
    if not ordered:
        return 0.0
    below = held_s
    for number, each in enumerate(ordered, start=1):
        below += each
        if number == len(ordered) or below <= ordered[number] * number:
            return below / number
    raise AssertionError("the last level holds everything")
