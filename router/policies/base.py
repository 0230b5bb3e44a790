"""The contract of a routing policy: values in, an order out; hooks for those that keep a memory.

A policy sees only replicas that may be chosen (`Routing` has dropped excluded, draining and full ones).
Knows tokens, load and, for policies that look at it, the prompt; knows neither sockets nor how a request
gets there. Owner: the router's event loop; nothing here blocks or waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cache.messages import ReplicaInfo
from cache.types import HashHint, ReplicaId, RequestId
from router.pricing.cost import Candidate, RequestShape


class PromptView(Protocol):
    """A prompt as text, for policies that place by it. Made when asked for: most never ask."""

    @property
    def text(self) -> str:
        """The whole prompt as the model reads it."""

    @property
    def first_user_text(self) -> str:
        """What the user said first; the whole prompt where there is no chat."""

    @property
    def session(self) -> str | None:
        """What the client says its requests have in common; None if it says nothing."""


class Heir(NamedTuple):
    """Who is to be the only one to hold a prefix that prompts share, for now."""

    replica_id: ReplicaId
    prefix: HashHint  # of its last block, and so of all of it
    tokens: int  # usable


class PolicyRequest(NamedTuple):
    """One request as a policy sees it."""

    request_id: RequestId
    shape: RequestShape
    hints: Sequence[HashHint] = ()  # chain of the prompt's full blocks, parent first
    prompt: PromptView | None = None  # None where only token ids are known
    heir: Heir | None = None  # of what it shares with others; None: anybody may hold that


def alone() -> tuple[int, int]:
    """The place of a router without peers."""
    return 0, 1


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What every policy is built with."""

    block_size: int  # tokens
    clock: Callable[[], float]  # seconds
    rng: random.Random
    peers: Callable[[], tuple[int, int]] = alone  # this router's place among the routers, and their number


class Scored(NamedTuple):
    """A candidate with its cost: less is better. The unit is the policy's; None if it does not count."""

    candidate: Candidate
    cost: float | None

    @property
    def replica_id(self) -> ReplicaId:
        return self.candidate.replica_id


class Policy(Protocol):
    """Orders candidates. May draw at random; changes nothing it is given."""

    @property
    def name(self) -> str: ...

    @property
    def uses_prefix(self) -> bool:
        """Whether what a replica holds can change the order."""

    def rank(self, candidates: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        """Every candidate once, best first. O(n log n)."""

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        """It may be among the candidates from now on."""

    def replica_removed(self, replica_id: ReplicaId) -> None:
        """It is gone, and everything that was remembered of it with it."""

    def routed(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        """The request was sent there. Once per attempt; again if another replica accepted it instead."""

    def finished(self, request_id: RequestId, hints: Sequence[HashHint]) -> None:
        """The request is over. hints: chain of the full blocks of its prompt and output, () if unknown."""


class StatelessPolicy:
    """The hooks of a policy that remembers nothing."""

    def replica_added(self, replica_id: ReplicaId, info: ReplicaInfo) -> None:
        pass

    def replica_removed(self, replica_id: ReplicaId) -> None:
        pass

    def routed(self, replica_id: ReplicaId, request: PolicyRequest) -> None:
        pass

    def finished(self, request_id: RequestId, hints: Sequence[HashHint]) -> None:
        pass
