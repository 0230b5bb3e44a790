"""What `GET /debug/route` answers: decisions and sums as plain values, on both ends of the wire.

The Router builds and encodes these, `python -m router` decodes and words them, so that neither can
misread the other. Ids and numbers only: no prompt, no text, no hash.
Knows journals, accounts and totals; knows neither HTTP nor words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TypeVar

import msgspec

from router.insight.accounting import AccountingTotals, TokenAccount
from router.insight.closed_loop import LoopTotals
from router.insight.journal import JournalEntry
from router.insight.kept_decision import KeptCandidate, KeptDecision
from router.insight.recording import RecordingTotals
from router.insight.shadow import ShadowTotals, ShadowVerdict

FORMAT_VERSION = 4
MAX_LAST = 200  # requests in one answer: made on the event loop, in a few milliseconds
MAX_CANDIDATES = 16  # kept and shown of one decision; of the rest their number


class CostView(msgspec.Struct, frozen=True):
    """The default policy's cost of one candidate, term by term, in seconds but for the slowdown.

    Where that policy decided, the total is the cost it went by.
    """

    backlog_s: float
    prefill_s: float
    decode_slowdown: float
    recompute_s: float
    alone_s: float
    memory_pressure_s: float
    total_s: float
    passed_s: float = 0.0
    # Charged of those that others are preferred to: other routers' own share, and all but an heir, who is not
    # charged what others wait for it.
    preference_s: float = 0.0


class CandidateView(msgspec.Struct, frozen=True):
    """One replica as the decision saw it."""

    replica: str
    cached_tokens: int  # of the prompt, believed to be in its cache
    is_matched: bool  # False: its cache was unknown
    num_running: int
    num_waiting: int
    queued_tokens: int  # uncached prompt tokens ahead
    cost: float | None  # the policy's own, less is better; None if it has none
    terms: CostView | None  # None while its speed was unknown


class OutcomeView(msgspec.Struct, frozen=True):
    """What the engine found. All in tokens but for `parts_at_block`."""

    replica: str
    available: int
    captured: int
    delivered: int
    uncached: dict[str, int]  # by reason; sums to prompt - delivered
    parts_at_block: int | None


class ShadowView(msgspec.Struct, frozen=True):
    """What the shadow policy would have done."""

    policy: str
    replica: str
    cached_tokens: int
    agrees: bool
    difference_s: float | None


class RequestView(msgspec.Struct, frozen=True):
    """One request: its decision, and what happened then. Times count from when it wanted a replica."""

    request_id: str
    policy: str
    reason: str
    prompt_tokens: int
    block_size: int
    hot_tokens: int
    recompute_weight: float
    held_s: float  # it waited at the router before the decision
    attempt: int  # that is shown, from 1: which computed the first token; the latest where none has yet
    num_attempts: int
    rest_to: str | None  # who was sent what was left of an answer that had been cut off
    excluded: list[str]  # replicas that had failed it or refused it before
    num_candidates: int
    candidates: list[CandidateView]  # best first, the first of them
    available_tokens: int
    exact_tokens: int  # of the chosen one's cached tokens, those it had itself announced
    outcome: OutcomeView | None  # None: no first token yet
    first_token_s: float | None
    total_s: float | None  # None: not over yet
    output_tokens: int
    shadow: ShadowView | None
    heir: str | None = None  # who was to be the only one to compute what it shares with others
    copied_to: str | None = None  # who was sent the hot prefix alone, beside the request


class TotalsView(msgspec.Struct, frozen=True):
    """Sums since the Router started, over requests that got a first token; in tokens but where said."""

    requests: int
    prompt: int
    available: int
    captured: int
    delivered: int
    uncached: dict[str, int]  # by reason
    elsewhere_by_decision: dict[str, int]
    parting_tokens: dict[str, int]  # diverged tokens by the block at which the prompts part (a power of two)
    parting_requests: dict[str, int]
    blockless_requests: int


class LoopView(msgspec.Struct, frozen=True):
    """Expected against found."""

    requests: int
    within_one_block: int
    recent_share_within_one: float
    missing_exact_tokens: int
    missing_predicted_tokens: int
    unexpected_tokens: int
    doubts: int


class ShadowTotalsView(msgspec.Struct, frozen=True):
    policy: str
    agreed: int
    disagreed: int
    extra_s: float
    saved_s: float
    spent_s: float
    failed: bool
    priced: int  # of the disagreed, whose cost is known


class RecordingView(msgspec.Struct, frozen=True):
    written: int
    dropped: int
    failed: int
    lost: int  # of those written


class SummaryView(msgspec.Struct, frozen=True):
    """One Router, its fleet, and its sums."""

    router: str  # names this Router process among several
    num_routers: int  # that it knows of, itself included
    uptime_s: float
    model: str
    policy: str
    block_size: int
    num_replicas: int
    cache_tokens: int  # of all replicas together
    totals: TotalsView
    loop: LoopView
    shadow: ShadowTotalsView | None
    recording: RecordingView | None


class DebugPage(msgspec.Struct, frozen=True):
    """The whole answer."""

    version: int
    summary: SummaryView
    requests: list[RequestView]  # newest first


def request_view(
    entry: JournalEntry, *, block_size: int, memory_pressure_s: float, max_candidates: int = MAX_CANDIDATES
) -> RequestView:
    """Everything of one request, with its best candidates. O(max_candidates)."""
    decision = entry.decision
    return RequestView(
        request_id=entry.request_id,
        policy=decision.policy,
        reason=decision.reason.value,
        prompt_tokens=decision.shape.num_prompt_tokens,
        block_size=block_size,
        hot_tokens=decision.shape.hot_tokens,
        recompute_weight=decision.shape.recompute_weight,
        held_s=max(0.0, decision.decided_at - entry.asked_at) if entry.attempt == 1 else 0.0,
        attempt=entry.attempt,
        num_attempts=entry.num_attempts,
        rest_to=entry.rest_to,
        excluded=sorted(decision.excluded),
        num_candidates=decision.num_candidates,
        candidates=_candidates(decision, memory_pressure_s, max_candidates),
        available_tokens=decision.available_tokens,
        exact_tokens=decision.exact_tokens,
        outcome=_outcome(entry.account) if entry.account is not None else None,
        first_token_s=_since(entry, entry.first_token_at),
        total_s=_since(entry, entry.finished_at),
        output_tokens=entry.num_output_tokens,
        shadow=_shadow(entry.verdict) if entry.verdict is not None else None,
        heir=decision.heir,
        copied_to=decision.copied_to,
    )


def merged(summaries: Sequence[SummaryView]) -> SummaryView:
    """Several Routers of one service as one: their sums added up. At least one summary."""
    shadows = [summary.shadow for summary in summaries if summary.shadow is not None]
    recordings = [summary.recording for summary in summaries if summary.recording is not None]
    return msgspec.structs.replace(
        summaries[0],
        router=", ".join(sorted(summary.router for summary in summaries)),
        uptime_s=min(summary.uptime_s for summary in summaries),
        totals=_added([summary.totals for summary in summaries]),
        loop=_merged_loop([summary.loop for summary in summaries]),
        shadow=_merged_shadow(shadows) if shadows else None,
        recording=_added(recordings) if recordings else None,
    )


def _merged_loop(loops: Sequence[LoopView]) -> LoopView:
    """The recent share: each Router's counts by what it measured."""
    num_measured = sum(loop.requests for loop in loops)
    recent = sum(loop.recent_share_within_one * loop.requests for loop in loops)
    return msgspec.structs.replace(
        _added(loops, keep=("recent_share_within_one",)),
        recent_share_within_one=recent / num_measured if num_measured else 1.0,
    )


def _merged_shadow(shadows: Sequence[ShadowTotalsView]) -> ShadowTotalsView:
    """Failed where one has."""
    return msgspec.structs.replace(
        _added(shadows, keep=("policy", "failed")), failed=any(each.failed for each in shadows)
    )


def totals_view(totals: AccountingTotals) -> TotalsView:
    return TotalsView(
        requests=totals.requests,
        prompt=totals.prompt,
        available=totals.available,
        captured=totals.captured,
        delivered=totals.delivered,
        uncached={reason.value: tokens for reason, tokens in totals.uncached.items()},
        elsewhere_by_decision={reason.value: tokens for reason, tokens in totals.elsewhere.items()},
        parting_tokens={str(block): tokens for block, tokens in sorted(totals.parting_tokens.items())},
        parting_requests={str(block): count for block, count in sorted(totals.parting_requests.items())},
        blockless_requests=totals.blockless,
    )


def loop_view(totals: LoopTotals, recent_share: float) -> LoopView:
    return LoopView(
        requests=totals.requests,
        within_one_block=totals.within_one_block,
        recent_share_within_one=recent_share,
        missing_exact_tokens=totals.missing_exact,
        missing_predicted_tokens=totals.missing_predicted,
        unexpected_tokens=totals.unexpected,
        doubts=totals.doubts,
    )


def shadow_totals_view(totals: ShadowTotals) -> ShadowTotalsView:
    return ShadowTotalsView(
        totals.policy,
        totals.agreed,
        totals.disagreed,
        totals.extra_s,
        totals.saved_s,
        totals.spent_s,
        totals.failed,
        totals.priced,
    )


def recording_view(totals: RecordingTotals) -> RecordingView:
    return RecordingView(totals.written, totals.dropped, totals.failed, totals.lost)


Sums = TypeVar("Sums", TotalsView, LoopView, ShadowTotalsView, RecordingView)


def _added(views: Sequence[Sums], keep: Collection[str] = ()) -> Sums:
    """Field by field; those to keep are the first one's."""
    changes: dict[str, object] = {}
    for name in views[0].__struct_fields__:
        values = [getattr(view, name) for view in views]
        if name in keep:
            continue
        changes[name] = (
            dict(sum(map(Counter, values), Counter())) if isinstance(values[0], dict) else sum(values)
        )
    return msgspec.structs.replace(views[0], **changes)


def _candidates(decision: KeptDecision, memory_pressure_s: float, most: int) -> list[CandidateView]:
    return [
        CandidateView(
            replica=candidate.replica_id,
            cached_tokens=candidate.cached_tokens,
            is_matched=candidate.is_matched,
            num_running=candidate.num_running,
            num_waiting=candidate.num_waiting,
            queued_tokens=candidate.queued_tokens,
            cost=candidate.cost,
            terms=_terms(candidate, decision, memory_pressure_s),
        )
        for candidate in decision.candidates[:most]
    ]


def _terms(candidate: KeptCandidate, decision: KeptDecision, memory_pressure_s: float) -> CostView | None:
    found = candidate.terms(decision.shape, decision.decided_at, memory_pressure_s)
    if found is None:
        return None
    total_s = found.total_s
    if decision.is_in_seconds and candidate.cost is not None and not math.isclose(candidate.cost, total_s):
        return CostView(**found._asdict(), total_s=candidate.cost, preference_s=candidate.cost - total_s)
    return CostView(**found._asdict(), total_s=total_s)


def _outcome(account: TokenAccount) -> OutcomeView:
    return OutcomeView(
        replica=account.replica_id,
        available=account.available,
        captured=account.captured,
        delivered=account.delivered,
        uncached={reason.value: tokens for reason, tokens in account.uncached.items()},
        parts_at_block=account.parts_at,
    )


def _shadow(verdict: ShadowVerdict) -> ShadowView:
    return ShadowView(
        verdict.policy, verdict.replica_id, verdict.cached_tokens, verdict.agrees, verdict.difference_s
    )


def _since(entry: JournalEntry, moment: float | None) -> float | None:
    return None if moment is None else max(0.0, moment - entry.asked_at)
