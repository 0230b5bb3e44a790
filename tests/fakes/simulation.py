"""What the simulation's tests share: small workloads made of sessions, and a small machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from loadtest.simulation.cell import CellSpec
from loadtest.simulation.machine import Machine
from loadtest.workloads.reference import WorkloadRef
from loadtest.workloads.request import Workload, WorkRequest

BLOCK_TOKENS = 16
MACHINE = Machine(
    base_s=0.01,
    per_token_s=0.001,
    per_attention_s=1e-6,
    per_sequence_s=0.002,
    max_batched_tokens=64,
    max_running=8,
    max_model_len=4096,
)
REFERENCE = WorkloadRef("unused")


def spec(**changes: Any) -> CellSpec:
    """Two replicas of 64 blocks on the small machine, without delays; requests are sent on at once."""
    base = CellSpec(
        REFERENCE,
        num_replicas=2,
        load=1.0,
        seed=0,
        policy="round_robin",
        router_options=(("binding", "at_once"),),
        cache_tokens=64 * BLOCK_TOKENS,
        event_delay_s=0.0,
        dispatch_delay_s=0.0,
        machine=MACHINE,
    )
    return replace(base, **changes)


class Blocks:
    """Hands out block ids: a prompt's are its parent's full blocks and fresh ones."""

    def __init__(self) -> None:
        self._next = 0

    def extend(self, parent: Sequence[int], input_tokens: int) -> tuple[int, ...]:
        num_blocks = -(-input_tokens // BLOCK_TOKENS)
        shared = tuple(parent[: input_tokens // BLOCK_TOKENS])
        fresh = num_blocks - len(shared)
        self._next += fresh
        return shared + tuple(range(self._next - fresh, self._next))


def request(
    arrival_s: float, input_tokens: int, output_tokens: int, block_ids: Sequence[int], session: int = 0
) -> WorkRequest:
    return WorkRequest(arrival_s, input_tokens, output_tokens, tuple(block_ids), session)


def workload(*requests: WorkRequest) -> Workload:
    return Workload("test", BLOCK_TOKENS, tuple(sorted(requests, key=lambda r: r.arrival_s)))


def unrelated(*shapes: tuple[float, int, int]) -> Workload:
    """Requests that share nothing: (arrival_s, input_tokens, output_tokens) each."""
    blocks = Blocks()
    return workload(
        *(
            request(arrival_s, inputs, outputs, blocks.extend((), inputs), session)
            for session, (arrival_s, inputs, outputs) in enumerate(shapes)
        )
    )


@st.composite
def workloads(draw: st.DrawFn, max_sessions: int = 6) -> Workload:
    """Sessions of a few turns over one system prompt, close enough in time to meet in the engines."""
    blocks = Blocks()
    head = blocks.extend((), BLOCK_TOKENS * draw(st.integers(0, 3))) if draw(st.booleans()) else ()
    requests = []
    for session in range(draw(st.integers(1, max_sessions))):
        time_s = draw(st.floats(0.0, 3.0))
        prompt, input_tokens = head, len(head) * BLOCK_TOKENS
        for _ in range(draw(st.integers(1, 3))):
            input_tokens += draw(st.integers(1, 90))
            output_tokens = draw(st.integers(1, 60))
            prompt = blocks.extend(prompt[: (input_tokens - 1) // BLOCK_TOKENS], input_tokens)
            requests.append(request(time_s, input_tokens, output_tokens, prompt, session))
            # The next prompt keeps the full blocks, and names anew the one that the answer went on in.
            prompt = prompt[: input_tokens // BLOCK_TOKENS]
            input_tokens += output_tokens
            time_s += draw(st.floats(0.0, 2.0))
    return workload(*requests)
