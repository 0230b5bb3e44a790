"""The fleet that most promises are tried on, and how much it can take.

Three replicas whose step is a sleep of modelled length, so that capacity follows from the settings and costs
no CPU. Equal settings everywhere: then one cluster serves promise after promise.
"""

from __future__ import annotations

from tests.e2e.faults.cluster import Spec
from tests.e2e.faults.traffic import Question, conversations

BLOCK_SIZE = 16  # tokens, deploy.yaml's
MAX_RUNNING = 32  # sequences in one step of a replica
BASE_S = 0.06  # of a step: slow, so that 32 streams cost the machine little
PER_SEQUENCE_S = 0.0004
PER_TOKEN_S = 0.00002
MAX_TOKENS = 32  # of an answer

ANSWER_S = 60  # that a leaving Router has: more than an answer takes on a machine with other work

PREFIXES = 24  # what three replicas can hold together and none alone: placement shows in the hit share
PREFIX_TOKENS = 1024
TAIL_TOKENS = 24  # of a prompt, its own


def spec() -> Spec:
    """Three replicas behind two Routers."""
    return Spec(
        replicas=3,
        routers=2,
        replica={
            "num_blocks": 1024,
            "max_running": MAX_RUNNING,
            "max_batched_tokens": 256,
            "sim": {"base_s": BASE_S, "per_sequence_s": PER_SEQUENCE_S, "per_token_s": PER_TOKEN_S},
        },
        router={"expose_debug": True},
        deployments={"Router": {"graceful_shutdown_timeout_s": ANSWER_S}},
    )


def requests_per_s(replicas: float, *, max_tokens: int = MAX_TOKENS) -> float:
    """What so many replicas can answer at most, prompts cached: full batches, step after step."""
    step_s = BASE_S + (PER_SEQUENCE_S + PER_TOKEN_S) * MAX_RUNNING
    return replicas * MAX_RUNNING / step_s / max_tokens


def questions() -> list[Question]:
    """Twice as many as there are shared prefixes; half greedy, half sampled."""
    return conversations(
        num_prefixes=PREFIXES,
        prefix_tokens=PREFIX_TOKENS,
        tail_tokens=TAIL_TOKENS,
        max_tokens=MAX_TOKENS,
        variants=2,
    )
