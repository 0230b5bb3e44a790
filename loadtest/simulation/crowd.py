"""The engines of one simulated machine: those that compute at one time slow each other.

Each goes through a whole step at the pace that it begins it with. What it publishes is what its fit would
have found: the mean of its last steps' paces.
"""

from __future__ import annotations

from cache.events import StepTimeModel
from loadtest.simulation.machine import Machine, SharedMachine, slowed
from replica.scheduling.step_time import FORGETTING


class Crowd:
    """Which engines of a machine compute."""

    def __init__(self, num_engines: float) -> None:
        """num_engines: that it computes at full speed."""
        self.num_engines = num_engines
        self._computing: set[int] = set()

    @classmethod
    def of(cls, machine: Machine) -> Crowd | None:
        """None where each replica has a machine of its own."""
        return cls(machine.num_engines) if isinstance(machine, SharedMachine) else None

    def slowdown(self, engine: int) -> float:
        """Times as long as alone, of a step that this engine begins now; it computes until `rests`."""
        self._computing.add(engine)
        return max(1.0, len(self._computing) / self.num_engines)

    def rests(self, engine: int) -> None:
        """It has nothing to do, or is gone."""
        self._computing.discard(engine)


class Pace:
    """What one engine's steps take on its machine."""

    def __init__(self, alone: StepTimeModel, engine: int, crowd: Crowd | None) -> None:
        self._alone = alone
        self._engine = engine
        self._crowd = crowd
        self._mean_slowdown = 1.0

    @property
    def fitted(self) -> StepTimeModel:
        """What the engine tells of itself."""
        return self._alone if self._crowd is None else slowed(self._alone, self._mean_slowdown)

    def step(self) -> StepTimeModel:
        """Of a step that begins now."""
        if self._crowd is None:
            return self._alone
        slowdown = self._crowd.slowdown(self._engine)
        self._mean_slowdown += (1.0 - FORGETTING) * (slowdown - self._mean_slowdown)
        return slowed(self._alone, slowdown)

    def rests(self) -> None:
        """The engine has nothing to do, or is gone."""
        if self._crowd is not None:
            self._crowd.rests(self._engine)
