"""Where every prompt token's computation came from: a hit, or a reason why it was not one.

    0           delivered      captured      available                 usable        full      prompt
    |--- hit ---|--- stale ----|- elsewhere -|-- what nobody holds ----|--- capped ---|- partial -|

    delivered   tokens the engine took from its cache
    captured    tokens the index expected at the replica that computed the prompt
    available   tokens of the longest match anywhere in the fleet
    usable      full blocks, but for the last token, which is always computed

Each boundary counts from where the ones before it end, so the reasons of one request sum to its uncached
tokens exactly, whatever the numbers. What nobody holds was held once (*evicted*), was computed after
something else (*diverged*) or under another salt, or is *cold*. Two bounded memories tell; what they have
forgotten counts as cold. Sums are over requests that got a first token, each by the attempt that computed it.

Knows decisions, tokens and hints; knows neither load, cost nor text. Owner: the router's event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache.events import EventBatch
from cache.types import HashHint, ReplicaId, RequestId
from router.insight.content_sketch import ContentSketch
from router.insight.held_memory import HeldMemory, as_words
from router.placement.decision import DecisionRecord, RouteQuery, RouteReason
from router.placement.observer import SilentObserver

MAX_BLOCKS = 16_384  # of one prompt that are looked at, about a millisecond; what is behind them is cold


class UncachedReason(StrEnum):
    """Why a prompt token had to be computed."""

    COLD = "cold"  # nobody is known to have computed it
    # Held once, by nobody now; or in host memory alone, from where copying would have taken longer.
    EVICTED = "evicted"
    ELSEWHERE = "elsewhere"  # another replica holds it and did not get the request
    STALE = "stale_index"  # expected in this replica's cache, and not there
    OTHER_SALT = "other_salt"  # computed under another salt or adapter only
    DIVERGED = "diverged"  # computed after something else: the prompts part earlier on
    PARTIAL = "partial_block"  # behind the last full block: never cached
    CAPPED = "capped_block"  # the last block of a prompt that ends with it: one token must be computed


_OF_NOBODY = (
    UncachedReason.COLD,
    UncachedReason.EVICTED,
    UncachedReason.DIVERGED,
    UncachedReason.OTHER_SALT,
)
_COLD, _EVICTED, _DIVERGED, _OTHER_SALT = range(len(_OF_NOBODY))
Codes = NDArray[np.uint8]
"""Reasons of consecutive blocks as indices into `_OF_NOBODY`, shape (blocks,)."""


class Regions(NamedTuple):
    """A prompt's uncached tokens, cut at the boundaries."""

    stale: int
    elsewhere: int
    nobody_from: int  # tokens [nobody_from, usable) are held by nobody
    usable: int
    capped: int
    partial: int


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """One request's prompt tokens. The reasons sum to `prompt - delivered`."""

    request_id: RequestId
    replica_id: ReplicaId  # that computed the first token
    prompt: int
    available: int
    captured: int
    delivered: int
    uncached: Mapping[UncachedReason, int]  # reasons that have tokens
    parts_at: int | None  # block at which the prompt parts from an earlier one of the same tokens further on


AccountListener = Callable[[TokenAccount, DecisionRecord], None]
"""Of an account, and of the decision about the attempt that computed the first token."""


@dataclass(slots=True)
class AccountingTotals:
    """Sums over all requests accounted for, in tokens where nothing else is said."""

    requests: int = 0
    prompt: int = 0
    available: int = 0
    captured: int = 0
    delivered: int = 0
    uncached: Counter[UncachedReason] = field(default_factory=Counter)
    elsewhere: Counter[RouteReason] = field(default_factory=Counter)  # of ELSEWHERE, by the decision's reason
    # DIVERGED by the block at which the prompts part, rounded down to a power of two: tokens, requests.
    parting_tokens: Counter[int] = field(default_factory=Counter)
    parting_requests: Counter[int] = field(default_factory=Counter)
    blockless: int = 0  # requests too short for one usable block


def regions(prompt: int, block_size: int, delivered: int, captured: int, available: int) -> Regions:
    """Cut tokens [delivered, prompt) at the boundaries; `delivered` lies within [0, prompt]. Pure."""
    full = prompt // block_size * block_size
    usable = max(0, prompt - 1) // block_size * block_size
    start = min(delivered, usable)
    held_here = min(max(delivered, captured), usable)
    held_anywhere = min(max(held_here, available), usable)
    return Regions(
        stale=held_here - start,
        elsewhere=held_anywhere - held_here,
        nobody_from=held_anywhere,
        usable=usable,
        capped=max(0, full - max(usable, delivered)),
        partial=prompt - max(full, delivered),
    )


def captured_tokens(record: DecisionRecord, replica_id: ReplicaId) -> int:
    """What the index expected at that replica; 0 for one that was no candidate."""
    if record.replica_id == replica_id:
        return record.cached_tokens
    ranking = record.ranking  # another rank took it: rare
    held = zip(ranking.states, ranking.cached, strict=True)
    return next((tokens for state, tokens in held if state.replica_id == replica_id), 0)


class _Open(NamedTuple):
    record: DecisionRecord
    query: RouteQuery
    hints: Sequence[HashHint]


class Accounting(SilentObserver):
    """Accounts for each request when its first token says what the engine had cached."""

    def __init__(
        self, block_size: int, *, held: HeldMemory | None = None, sketch: ContentSketch | None = None
    ) -> None:
        self.totals = AccountingTotals()
        self._block_size = block_size
        self._held = held or HeldMemory()
        self._sketch = sketch or ContentSketch(block_size)
        self._open: dict[RequestId, _Open] = {}  # decided, no token yet
        self._listeners: list[AccountListener] = []

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_bytes(self) -> int:
        """Of the two memories, at most."""
        return self._held.num_bytes + self._sketch.num_bytes

    def listen(self, listener: AccountListener) -> None:
        """Call `listener` with every account; it must not block."""
        self._listeners.append(listener)

    # --- RoutingObserver ----------------------------------------------------------------------

    def decided(self, record: DecisionRecord, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        self._open[query.request_id] = _Open(record, query, hints)

    def first_token(self, request_id: RequestId, replica_id: ReplicaId, cached_tokens: int) -> None:
        opened = self._open.pop(request_id, None)
        if opened is None:
            return
        account = self._account(opened, replica_id, cached_tokens)
        self._add(account, opened.record.reason)
        for listener in self._listeners:
            listener(account, opened.record)

    def finished(self, request_id: RequestId, hints: Sequence[HashHint], answers: Sequence[int]) -> None:
        self._open.pop(request_id, None)

    def events(self, replica_id: ReplicaId, events: EventBatch) -> None:
        if gone := (*events.removed, *events.hosted):
            self._held.record(as_words(gone))

    # --- one request --------------------------------------------------------------------------

    def _account(self, opened: _Open, replica_id: ReplicaId, cached_tokens: int) -> TokenAccount:
        record, prompt = opened.record, opened.query.num_prompt_tokens
        delivered = min(max(cached_tokens, 0), prompt)
        captured = captured_tokens(record, replica_id)
        cut = regions(prompt, self._block_size, delivered, captured, record.available_tokens)
        codes = self._learn(opened, delivered // self._block_size, cut)
        uncached = (
            (UncachedReason.STALE, cut.stale),
            (UncachedReason.ELSEWHERE, cut.elsewhere),
            *self._of_nobody(codes, cut),
            (UncachedReason.CAPPED, cut.capped),
            (UncachedReason.PARTIAL, cut.partial),
        )
        return TokenAccount(
            request_id=opened.query.request_id,
            replica_id=replica_id,
            prompt=prompt,
            available=record.available_tokens,
            captured=captured,
            delivered=delivered,
            uncached={reason: tokens for reason, tokens in uncached if tokens},
            parts_at=_parting_block(codes, cut.nobody_from // self._block_size),
        )

    def _learn(self, opened: _Open, first_computed: int, cut: Regions) -> Codes:
        """Why nobody holds the blocks of [nobody_from, usable); then remembers every block computed now."""
        query, size = opened.query, self._block_size
        hints = opened.hints[first_computed : first_computed + MAX_BLOCKS]
        if not len(hints):
            return np.zeros(0, dtype=np.uint8)
        words = as_words(hints)
        asked = slice(
            min(cut.nobody_from // size - first_computed, len(words)),
            min(cut.usable // size - first_computed, len(words)),
        )
        codes = np.zeros(asked.stop - asked.start, dtype=np.uint8)
        if query.token_ids is not None:
            keys = self._sketch.keys(query.token_ids, words, first_computed, query.cache_salt)
            if len(codes):
                seen = self._sketch.look(keys.some(asked))
                codes[seen.other_salt] = _OTHER_SALT
                codes[seen.diverged] = _DIVERGED
                codes[seen.same_block] = _EVICTED
            self._sketch.record(keys)
        if len(codes):
            codes[self._held.knows(words[asked])] = _EVICTED
        if query.token_ids is None:  # else the sketch remembers them
            self._held.record(words)
        return codes

    def _of_nobody(self, codes: Codes, cut: Regions) -> list[tuple[UncachedReason, int]]:
        """Tokens by reason; all of [nobody_from, usable), those without a code as cold."""
        total = cut.usable - cut.nobody_from
        if not codes.any():
            return [(UncachedReason.COLD, total)]
        tokens = (np.bincount(codes, minlength=len(_OF_NOBODY)) * self._block_size).tolist()
        # An engine whose hit ends within a block has part of the first one.
        tokens[codes[0]] -= cut.nobody_from % self._block_size
        tokens[_COLD] += total - sum(tokens)
        return list(zip(_OF_NOBODY, tokens, strict=True))

    def _add(self, account: TokenAccount, reason: RouteReason) -> None:
        totals = self.totals
        totals.requests += 1
        totals.prompt += account.prompt
        totals.available += account.available
        totals.captured += account.captured
        totals.delivered += account.delivered
        totals.blockless += account.prompt <= self._block_size
        for why, tokens in account.uncached.items():
            totals.uncached[why] += tokens
        if elsewhere := account.uncached.get(UncachedReason.ELSEWHERE):
            totals.elsewhere[reason] += elsewhere
        if account.parts_at is not None:
            bucket = 1 << account.parts_at.bit_length() >> 1
            totals.parting_tokens[bucket] += account.uncached[UncachedReason.DIVERGED]
            totals.parting_requests[bucket] += 1


def _parting_block(codes: Codes, first: int) -> int | None:
    """The block at which a prompt parts from one computed earlier, if it holds the same blocks further on.

    codes: of the blocks from `first` on. That is the first block nobody holds; where that one is itself
    known from elsewhere, the difference lies before it.
    """
    if not len(codes) or not (is_diverged := codes == _DIVERGED).any():
        return None
    return max(0, first - 1) if is_diverged[0] else first
