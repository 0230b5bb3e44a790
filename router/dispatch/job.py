"""What is to be generated, and for whom. Values alone: `Generation` does it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache.messages import PinLease, SamplingParams
from cache.structure import Structure
from cache.types import BlockHash, ReplicaId, RequestId
from router.placement.decision import Admittance
from router.policies import PromptView


def _nobody_pays(_num_tokens: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to generate from, complete and checked."""

    request_id: RequestId
    prompt: array[int]  # packed int32
    block_hashes: Sequence[BlockHash]  # of the prompt's full blocks, parent first
    sampling: SamplingParams
    seed: int
    cache_salt: str = ""
    tenant: str = ""  # whose turn it uses, here and at the replica
    share: float = 1.0  # its tenant's part, beside other tenants'
    priority: int = 0  # among its tenant's requests
    part: float = 1.0  # of its HTTP request: of n prompts each is 1/n
    admittance: Admittance | None = None  # that these share
    policy: str | None = None  # None = the configured one
    text: PromptView | None = None  # for policies that place by it
    session: str | None = None  # which of its client's requests belong together, as a header says
    timeout_s: float | None = None  # after which nobody wants it any more; None = the configured one
    came_at: float | None = None  # when its HTTP request did, by the Router's clock; None: as it is begun
    traceparent: str = ""  # of the span it is done under; "" = nobody traces
    pin: PinLease | None = None  # its prompt is to be held, and nothing generated
    structure: Structure | None = None  # what the answer has to be; None = anything
    n: int = 1  # answers to it
    excluded: frozenset[ReplicaId] = frozenset()  # not to be sent there, whoever else fails
    is_again: bool = False  # something like it was let in before: it is not refused for being one too many
    spend: Callable[[int], None] = _nobody_pays  # told of its answers' tokens, each once: see `TokenAccount`
