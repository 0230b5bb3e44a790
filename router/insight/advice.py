"""What would raise the hit rate, ranked by the tokens it costs: from sums alone, prompts unseen.

Each piece of advice names tokens that were computed for one kind of reason, and what makes that reason go
away. The tokens are an upper bound: what was computed twice for another reason as well is not known.
Knows what `/debug/route` sums up; knows neither HTTP nor terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cache.counted import counted
from router.insight.accounting import UncachedReason
from router.insight.debug_view import SummaryView, TotalsView
from router.placement.decision import RouteReason

MIN_SHARE = 0.005  # of all prompt tokens: less than that is not worth a change
SMALL_BLOCK = 16  # tokens: below this, a finer block costs more in bookkeeping than it saves


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change, worth at most `tokens` that need not be computed."""

    title: str
    tokens: int
    evidence: str
    change: str


def hit_ratio(totals: TotalsView) -> float:
    """Prompt tokens taken from caches, 0 to 1; 0 before the first request."""
    return totals.delivered / totals.prompt if totals.prompt else 0.0


def advise(summary: SummaryView) -> list[Advice]:
    """Worth most first; nothing below `MIN_SHARE` of all prompt tokens."""
    found = [piece for source in _SOURCES for piece in source(summary)]
    floor = MIN_SHARE * summary.totals.prompt
    return sorted((piece for piece in found if piece.tokens > floor), key=lambda piece: -piece.tokens)


def _diverged(summary: SummaryView) -> Iterator[Advice]:
    """By where the prompts part, in powers of two: what to move is the same for neighbours."""
    totals, size = summary.totals, summary.block_size
    for block_text, tokens in totals.parting_tokens.items():
        block, requests = int(block_text), totals.parting_requests.get(block_text, 0)
        last = max(1, 2 * block) - 1
        where = f"block {block}" if block == last else f"blocks {block} to {last}"
        first_token, last_token = block * size, (last + 1) * size - 1
        share = f"{requests / totals.requests:.0%}"
        top = "at the top of the prompt" if block == 0 else f"at tokens {first_token:,} to {last_token:,}"
        yield Advice(
            title=f"Move what changes {top} behind what stays",
            tokens=tokens,
            evidence=(
                f"{requests:,} of {counted(totals.requests, 'request')} ({share}) part in {where} "
                "from an earlier prompt that goes on with the same tokens"
            ),
            change=(
                "a date, a request id or a user's name there makes everything behind it new: put it last, or "
                "leave it out; keep the order of tools and documents fixed"
            ),
        )


def _evicted(summary: SummaryView) -> Iterator[Advice]:
    yield Advice(
        title="Give the replicas more cache",
        tokens=_of(summary, UncachedReason.EVICTED),
        evidence=(
            "computed before and evicted since, or gone with a replica; "
            f"{summary.cache_tokens:,} tokens fit the cache of {counted(summary.num_replicas, 'replica')}"
        ),
        change=(
            "raise num_blocks or kv_memory_fraction, or add replicas; record the traffic (`record:`), and "
            "`python -m loadtest plan` shows the hit rate against the cache size"
        ),
    )


def _elsewhere(summary: SummaryView) -> Iterator[Advice]:
    by_decision = summary.totals.elsewhere_by_decision
    turn = by_decision.get(RouteReason.TURN, 0)
    blind = by_decision.get(RouteReason.BLIND, 0)
    busy = sum(by_decision.values()) - turn - blind
    yield Advice(
        title="Place requests by what is cached",
        tokens=turn,
        evidence=f"another replica held them, and the policy ({summary.policy}) does not look",
        change="set policy: expected_time under args.router",
    )
    yield Advice(
        title="Find out why replicas are not followed",
        tokens=blind,
        evidence="another replica held them; the one chosen was silent, or carries another fingerprint",
        change="look at /version (shares_fingerprint) and at the log lines 'replica is silent'",
    )
    yield Advice(
        title="Relieve the replicas that hold the prefixes",
        tokens=busy,
        evidence=(
            "another replica held them, and waiting for it would have cost more than computing again, or it "
            "was full, draining or excluded"
        ),
        change="add replicas, or spread arrivals: with shorter queues more requests go where their prefix is",
    )


def _stale(summary: SummaryView) -> Iterator[Advice]:
    loop = summary.loop
    yield Advice(
        title="Shorten the way from the cache to the index",
        tokens=_of(summary, UncachedReason.STALE),
        evidence=(
            f"expected and not found: {counted(loop.missing_exact_tokens, 'token')} that replicas had "
            f"announced, {loop.missing_predicted_tokens:,} that the router had guessed; "
            f"{counted(loop.doubts, 'snapshot')} asked for"
        ),
        change=(
            "caches that turn over between decision and start are too small or too busy; events that are "
            "lost show in warmpath_event_resyncs_total"
        ),
    )


def _other_salt(summary: SummaryView) -> Iterator[Advice]:
    yield Advice(
        title="Share a cache_salt where prompts may be shared",
        tokens=_of(summary, UncachedReason.OTHER_SALT),
        evidence="the same tokens were computed under another cache_salt, or for another tenant, only",
        change=(
            "a salt keeps caches apart on purpose: give one to each tenant, not to each user or session; "
            "with API keys each tenant has its own, so let keys that may share name one `tenant`"
        ),
    )


def _blocks(summary: SummaryView) -> Iterator[Advice]:
    """Half as long blocks halve what stands behind the last one, and what is capped with it."""
    totals = summary.totals
    if summary.block_size <= SMALL_BLOCK:
        return
    unfit = _of(summary, UncachedReason.PARTIAL) + _of(summary, UncachedReason.CAPPED)
    yield Advice(
        title="Use smaller blocks",
        tokens=unfit // 2,
        evidence=(
            f"{unfit:,} tokens stand behind the last usable block of {summary.block_size}; "
            f"{totals.blockless_requests:,} requests have no usable block at all"
        ),
        change=f"block_size: {summary.block_size // 2} under args.replica",
    )


def _of(summary: SummaryView, reason: UncachedReason) -> int:
    return summary.totals.uncached.get(reason, 0)


_SOURCES: tuple[Callable[[SummaryView], Iterator[Advice]], ...] = (
    _diverged,
    _evicted,
    _elsewhere,
    _stale,
    _other_salt,
    _blocks,
)
