"""In which order an engine computes prompts: the policy of its queue.

A request's place is settled when it comes and never changes, since all age alike: whoever is behind somebody
now was always going to be. So there is one bound for everybody (docs/design/019-scheduling-order.md):

    nobody goes first who came more than  own prefill seconds / AGING + LEVEL_S * levels  later

the first only where shorter ones go first, the second for each level of priority (`cache/priority.py`) that
the other has beyond its own.

Arithmetic alone: knows seconds; knows neither requests nor blocks. Engines order by it, and Routers that hold
requests back foresee with it whom an engine would let by.
"""

from __future__ import annotations

from enum import StrEnum

from cache.priority import lag_s

# Prefill seconds that a waited second makes up for, as in the Routers' own queue: a prompt that takes a
# second has been overtaken for the last time after ten.
AGING = 0.1


class SchedulingOrder(StrEnum):
    """What may be chosen."""

    FIRST_COME = "first_come"
    SHORTEST = "shortest"  # least uncached prefill first, aging; a prompt that has begun is finished
    SHORTEST_PREEMPTING = "shortest_preempting"  # ... and one that has begun stands back for a shorter one

    @property
    def preempts(self) -> bool:
        """Whether a prompt that is half computed waits, its blocks kept, for one that goes before it."""
        return self is SchedulingOrder.SHORTEST_PREEMPTING

    def place(self, own_s: float, *, came_s: float, now_s: float) -> float:
        """Least goes first, and of equals whoever came first; of one priority.

        own_s: of prefill, for what is not cached; 0 while nobody has measured how long that takes, and until
        then it is first come. came_s: when it began to wait, at a Router or here. now_s: when it came here.
        """
        return now_s if self is SchedulingOrder.FIRST_COME else own_s + AGING * came_s

    def lag(self, priority: int) -> float:
        """What its priority adds to a place."""
        lag = lag_s(priority)
        return lag if self is SchedulingOrder.FIRST_COME else AGING * lag
