"""What the tests of routing policies share: candidates on paper, prompts as text or blocks, a look inside."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from cache.types import HashHint, ReplicaId, RequestId
from router.policies import Policy, PolicyContext, PolicyRequest, Scored, make_policy
from router.pricing.cost import Candidate, RequestShape
from tests.fakes.router import BLOCK_SIZE, FakeClock, hint_chain, info, view

OPAQUE = (random.Random, FakeClock, str, bytes, int, float, type(None))


@dataclass(frozen=True, slots=True)
class FakePrompt:
    """A prompt as text, all of it the user's."""

    text: str = ""
    session: str | None = None

    @property
    def first_user_text(self) -> str:
        return self.text


def candidate(name: str, cached: int = 0, **changes: object) -> Candidate:
    return Candidate(ReplicaId(name), view(**changes), cached, True)


def candidates(names: str, **changes: object) -> list[Candidate]:
    """One per letter, all alike."""
    return [candidate(name, **changes) for name in names]


def busy(name: str, requests: int, **changes: object) -> Candidate:
    """A replica with so many requests, all sent by this router."""
    return candidate(name, num_requests=requests, num_in_flight=requests, **changes)


def of_blocks(
    hints: Sequence[HashHint], *, name: str = "r", extra_tokens: int = 0, session: str | None = None
) -> PolicyRequest:
    """A prompt known only as blocks."""
    shape = RequestShape(max(1, len(hints) * BLOCK_SIZE + extra_tokens))
    return PolicyRequest(RequestId(name), shape, tuple(hints), FakePrompt(session=session))


def of_text(text: str, *, session: str | None = None) -> PolicyRequest:
    """A prompt known as text alone."""
    return PolicyRequest(
        RequestId("r"), RequestShape(max(1, len(text) // 4)), (), FakePrompt(text, session=session)
    )


def cold(name: str, num_blocks: int = 4) -> PolicyRequest:
    """A prompt nobody has seen, known as blocks."""
    return of_blocks(hint_chain(name, num_blocks), name=name, extra_tokens=1)


class Bench:
    """A policy with replicas that joined it, one per letter."""

    def __init__(
        self,
        name: str,
        replicas: str = "abc",
        options: Mapping[str, object] | None = None,
        *,
        seed: int = 0,
        num_blocks: int = 10_000,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self.clock = FakeClock()
        self.num_blocks = num_blocks
        context = PolicyContext(block_size, self.clock, random.Random(seed))
        self.policy: Policy = make_policy(name, options, context=context)
        self.join(replicas)

    def join(self, replicas: str) -> None:
        for replica in replicas:
            self.policy.replica_added(ReplicaId(replica), info(num_blocks=self.num_blocks))

    def leave(self, replica: str) -> None:
        self.policy.replica_removed(ReplicaId(replica))

    def sent(self, replica: str, request: PolicyRequest) -> None:
        """The request went there."""
        self.policy.routed(ReplicaId(replica), request)

    def rank(self, among: Sequence[Candidate], request: PolicyRequest) -> list[Scored]:
        return self.policy.rank(among, request)

    def choice(self, among: Sequence[Candidate], request: PolicyRequest) -> str:
        return self.rank(among, request)[0].replica_id

    def place(self, among: Sequence[Candidate], request: PolicyRequest) -> str:
        """Choose and send there, as `Routing` does."""
        chosen = self.rank(among, request)[0].replica_id
        self.policy.routed(chosen, request)
        return chosen

    def choices(self, among: Sequence[Candidate], request: PolicyRequest, times: int = 200) -> Counter[str]:
        """What comes of asking again and again, nothing being sent."""
        return Counter(self.choice(among, request) for _ in range(times))


def contents(root: object) -> Counter[str]:
    """Everything reachable from an object through its attributes and containers: texts with how often, and
    all the rest under "". For finding what is remembered, and how much."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    pending: list[Any] = [root]
    while pending:
        value = pending.pop()
        found[value if isinstance(value, str) else ""] += 1
        if isinstance(value, OPAQUE) or id(value) in seen or callable(value):
            continue
        seen.add(id(value))
        pending.extend(_parts(value))
    return found


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if hasattr(value, "__iter__"):
        return list(islice(value, 10_000_000))
    slots = [slot for kind in type(value).__mro__ for slot in getattr(kind, "__slots__", ())]
    return [*vars(value).values()] if hasattr(value, "__dict__") else [getattr(value, s) for s in slots]
