"""What goes into a routing decision and what comes out: plain values, and the numbers beside them.

Knows names and counts; decides nothing (`routing.py` does).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from cache.types import BlockHash, ReplicaId, RequestId
from router.placement.ranking import Ranking
from router.policies import Heir, Policy, PolicyRequest, PromptView, Scored
from router.policies.expected_time import ExpectedTime
from router.pricing.cost import RequestShape, engine_s


class RouteReason(StrEnum):
    """Why the chosen replica was chosen."""

    PREFIX = "prefix"  # nobody that may be chosen holds more of the prompt
    LOAD = "load"  # somebody holds more, but would take longer
    COLD = "cold"  # nobody that may be chosen holds any of it
    BLIND = "blind"  # the chosen one's cache is unknown: silent, or another fingerprint
    TURN = "turn"  # the policy does not look at prefixes


class Admittance:
    """Of what came in one HTTP request, together: once one of its prompts is let in, the others are, whatever
    work they are. Its client is answered all of them or none, and they would be refused for each other. Once
    one is placed none is refused, or that one's work is done for nobody."""

    __slots__ = ("has_begun", "is_given")

    def __init__(self) -> None:
        self.is_given = False
        self.has_begun = False


class RouteQuery(NamedTuple):
    """One attempt at one request, as `choose` wants it. (A tuple is made in a quarter of a frozen dataclass's
    time, and every request makes one.)"""

    request_id: RequestId
    block_hashes: Sequence[
        BlockHash
    ]  # of all full blocks of the tokens sent, under this Router's fingerprint
    num_prompt_tokens: int  # all tokens sent: prompt and what an earlier attempt generated
    excluded: frozenset[ReplicaId] = frozenset()
    policy: str | None = None  # instead of the configured one, for this request only
    max_tokens: int = 0  # tokens it may generate, in each answer
    n: int = 1  # answers
    prompt: PromptView | None = None  # its text, for policies that place by it
    session: str | None = None  # what its client says, of requests of one salt
    # What `num_prompt_tokens` counts, packed int32, for those who account for every token; None: unknown. The
    # array may grow afterwards.
    token_ids: array[int] | None = None
    cache_salt: str = ""  # requests of different salts share no block
    tenant: str = ""  # whose turn it uses, where several wait
    share: float = 1.0  # its tenant's, beside other tenants'; above 0
    priority: int = 0  # among its tenant's: `cache/priority.py`
    part: float = 1.0  # of what came in one HTTP request: of n prompts each is 1/n
    admittance: Admittance | None = None  # which these share; None: it came alone
    asked_at: float | None = None  # when the request first wanted a replica, the clock's; None: just now
    is_handed_over: bool = False  # the replica that had it leaves: where nobody is left, others are to come
    is_again: bool = False  # it was let in before, whether it excludes a replica for that or not
    attempt: int = 0  # of this Router's at the request: as the replica is told

    @property
    def is_new(self) -> bool:
        """It may be refused for being one too many. Whoever was placed before has waited, and may have begun
        to be answered."""
        return not self.is_again

    @property
    def has_to_be_admitted(self) -> bool:
        """Whether there has to be room for it. Who is new counts as having come all the same."""
        return self.is_new and not (self.admittance is not None and self.admittance.is_given)

    @property
    def may_be_turned_away(self) -> bool:
        """Though it was let in: nothing has been done yet for whoever sent it."""
        return self.is_new and not (self.admittance is not None and self.admittance.has_begun)

    def admit(self) -> None:
        """There was; or nobody had to ask."""
        if self.admittance is not None:
            self.admittance.is_given = True

    def begin(self) -> None:
        """It goes to a replica."""
        if self.admittance is not None:
            self.admittance.has_begun = True


class Placement(NamedTuple):
    """Where a request should go. A reservation under its id is held until `release`."""

    request_id: RequestId
    ranks: tuple[ReplicaId, ...]  # best first, never empty
    overlap_blocks: int  # leading blocks the best one is expected to hold
    block_hashes: Sequence[BlockHash]  # to send along; () unless every rank shares our fingerprint
    reason: RouteReason
    policy: str
    engine_s: float = 0.0  # of the best one's time, for its prefill; 0 while unknown

    @property
    def replica_id(self) -> ReplicaId:
        return self.ranks[0]


class HotCopy(NamedTuple):
    """A hot prefix that is worth computing on one more replica, where no request waits for it."""

    replica_id: ReplicaId
    num_tokens: int  # the prompt's first, of whole blocks


NO_COPIES: Mapping[ReplicaId, float] = {}


class Decision(NamedTuple):
    """Where a request should go at one moment. Nothing is booked until it is acted on."""

    query: RouteQuery
    request: PolicyRequest
    policy: Policy
    ranking: Ranking
    available_tokens: int  # of the prompt, usable: the most any replica holds, draining and full ones too
    prefill_s: float  # of it on the best replica, alone there; 0 while speeds are unknown
    copy_s: Mapping[ReplicaId, float] = NO_COPIES  # of what each of them first copies back from host memory
    hot_copy: HotCopy | None = None  # to be made when the decision is acted on

    @property
    def starts_now(self) -> bool:
        """Its replica has nothing before it, as far as is known."""
        best, now = self.ranking.best, self.ranking.decided_at
        return best.price is not None and best.busy_until <= now <= best.silent_at

    @property
    def engine_s(self) -> float:
        """Seconds of that replica's time that its prefill takes among other work; 0 while unknown."""
        return self._engine_s_after(0)

    @property
    def twin_engine_s(self) -> float:
        """The same once its heir has computed, for another prompt, what they share."""
        return self._engine_s_after(self.request.heir.tokens if self.request.heir is not None else 0)

    def _engine_s_after(self, tokens: int) -> float:
        price = self.ranking.best.price
        if price is None:
            return 0.0
        return engine_s(price, self.query.num_prompt_tokens, max(tokens, self.ranking.best_cached))

    @property
    def start_s(self) -> float:
        """Seconds until the best replica would start on it; 0 while speeds are unknown."""
        return self.ranking.best.backlog_s(self.ranking.decided_at)


class DecisionRecord(NamedTuple):
    """One decision with everything it was made from; `router.pricing.cost` recomputes its terms exactly."""

    request_id: RequestId
    decided_at: float  # seconds, the clock's
    policy: str
    shape: RequestShape
    ranking: Ranking
    excluded: frozenset[ReplicaId]
    reason: RouteReason
    available_tokens: int = 0  # of the prompt, usable: the most any replica holds, draining and full ones too
    exact_tokens: int = 0  # of the chosen one's `cached_tokens`, those it has itself said it holds
    heir: Heir | None = None  # who was to be the only one to hold what it shares with others
    hot_copy: HotCopy | None = None  # that it had made beside it

    @property
    def replica_id(self) -> ReplicaId:
        """The one chosen."""
        return self.ranking.best.replica_id

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, usable: what the chosen one was believed to hold."""
        return self.ranking.best_cached

    @property
    def is_in_seconds(self) -> bool:
        """Whether its costs are the default policy's, in seconds. O(candidates)."""
        return self.policy == ExpectedTime.name and all([s.price is not None for s in self.ranking.states])

    @property
    def ranked(self) -> tuple[Scored, ...]:
        """Candidates with load, match and cost, best first. Made at the first call: tens of microseconds."""
        return self.ranking.scored()
