"""What those who hold requests back ask of `Routing`: so that they can be driven without a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.errors import AllBusy, NoReplica
from router.placement.decision import Decision, Placement, RouteQuery
from router.placement.replica_queues import ReplicaQueues
from router.placement.weighing import NOBODY, Ahead
from router.pricing.replica_state import ReplicaState


class Deciding(Protocol):
    """Decisions, and the fleet as far as they need it."""

    @property
    def queues(self) -> ReplicaQueues:
        """What waits at each replica for its first token."""

    def weigh(self, query: RouteQuery, *, earlier: Decision | None = None, ahead: Ahead = NOBODY) -> Decision:
        """Where it should go now, behind those; books nothing. Raises RoutingError or ConfigError."""

    def could_win(self, earlier: Decision, free: Sequence[ReplicaState], ahead: Ahead = NOBODY) -> bool:
        """Whether weighing it anew might choose one of these; much cheaper than weighing."""

    def book(self, decision: Decision) -> Placement:
        """Act on a decision just taken."""

    def free_replicas(self, within_s: float, within_steps: float = 0.0) -> tuple[int, list[ReplicaState]]:
        """How many replicas may be chosen, now or in time; and those that would start so soon on new work, in
        seconds or in what so many steps take there without a prompt."""

    def wait_s(self, held_s: float) -> float:
        """Until somebody could start on a newcomer, when so much work goes before it; 0: at once."""

    def note_held(self, num_held: int) -> None:
        """So many requests wait here: they count as queued."""

    def note_refused(self, error: AllBusy | NoReplica) -> None:
        """Somebody was not taken in, or let go without a replica, for that."""
