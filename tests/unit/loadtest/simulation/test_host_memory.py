"""A simulated fleet with host memory behind its caches."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from loadtest.simulation.machine import H100_8B, MachineWithHost
from loadtest.simulation.run import simulate
from tests.fakes.simulation import BLOCK_TOKENS, MACHINE, request, spec, workload

# Two prompts that do not fit beside each other, by turns; each block takes 4 s to compute.
PROMPT_BLOCKS = 40
WORK = workload(
    *(
        request(
            1000.0 * turn,
            PROMPT_BLOCKS * BLOCK_TOKENS,
            2,
            range(100 * (turn % 2), 100 * (turn % 2) + 40),
            turn,
        )
        for turn in range(6)
    )
)


def hosted(copy_block_s: float) -> MachineWithHost:
    return MachineWithHost(**asdict(MACHINE), host_blocks=200, copy_block_s=copy_block_s)


def test_evicted_prompts_come_back_and_their_copies_take_time() -> None:
    plain = simulate(WORK, spec(num_replicas=1))
    in_pool = plain.cached_tokens[2:] // BLOCK_TOKENS
    assert (in_pool < PROMPT_BLOCKS - 1).all(), "both fit into the pool"
    found = simulate(WORK, spec(num_replicas=1, machine=hosted(0.001)))
    assert found.cached_tokens.tolist() == [0, 0, *[(PROMPT_BLOCKS - 1) * BLOCK_TOKENS] * 4]
    slower = simulate(WORK, spec(num_replicas=1, machine=hosted(0.002)))
    copied = PROMPT_BLOCKS - 1 - in_pool
    assert slower.ttft_s[2:] - found.ttft_s[2:] == pytest.approx(copied * 0.001)


def test_what_takes_longer_to_copy_is_computed() -> None:
    plain, found = (simulate(WORK, spec(num_replicas=1, machine=m)) for m in (MACHINE, hosted(1e6)))
    assert found.ttft_s.tolist() == plain.ttft_s.tolist()


def test_cells_without_it_keep_their_names() -> None:
    assert "host" not in repr(spec(machine=H100_8B))
    assert spec(machine=hosted(1.0)).digest() != spec().digest()
