"""A simulated replica's host memory: production's tier, and a copy that takes what the machine says."""

from __future__ import annotations

from cache.host_tier import HostTier, TierEventSink
from loadtest.simulation.machine import Machine, MachineWithHost
from replica.scheduling.copy_pace import CopyPace
from replica.scheduling.runner import CopyTime


def host_tier(machine: Machine, slowdown: float, block_size: int, sink: TierEventSink) -> HostTier | None:
    """None for a machine that has none."""
    if not isinstance(machine, MachineWithHost):
        return None
    step_time = machine.step_time(slowdown)
    pace = CopyPace(lambda: step_time, block_size=block_size, max_batched_tokens=machine.max_batched_tokens)
    pace.observe(CopyTime(is_load=True, num_blocks=1, elapsed_s=machine.copy_block_s))
    return HostTier(machine.host_blocks, sink, is_cheaper=pace.is_cheaper)
