"""Metrics of what `insight.py` watches: where prompt tokens came from, matches against findings, the
shadow policy, the recording. Under the rules of `metrics.py`: few, known labels, read at scrape time.

Knows Prometheus and totals; knows neither HTTP nor where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)

from router.insight.accounting import AccountingTotals, UncachedReason
from router.insight.closed_loop import ERROR_BOUNDS, LoopTotals
from router.insight.insight import InsightTotals
from router.insight.recording import RecordingTotals
from router.insight.shadow import ShadowTotals
from router.scraped import Scraped, counters, histogram


class InsightCollector(Scraped[InsightTotals]):
    """Reads the totals at scrape time."""

    def families(self, totals: InsightTotals) -> Iterable[Metric]:
        yield from _tokens(totals.accounting)
        yield GaugeMetricFamily(
            "warmpath_accounting_bytes",
            "What remembers held and computed blocks takes at most, bytes.",
            totals.accounting_bytes,
        )
        yield from _loop(totals.loop, totals.recent_share_within_one)
        if totals.shadow is not None:
            yield from _shadow(totals.shadow)
        if totals.recording is not None:
            yield from _recording(totals.recording)


def _tokens(totals: AccountingTotals) -> Iterable[Metric]:
    yield CounterMetricFamily(
        "warmpath_prompt_tokens",
        "Prompt tokens of requests that got a first token: hits delivered, and uncached ones.",
        totals.prompt,
    )
    yield counters(
        "warmpath_hit_tokens",
        "Prompt tokens cached anywhere (available), expected where sent (captured), found (delivered).",
        "stage",
        {"available": totals.available, "captured": totals.captured, "delivered": totals.delivered},
    )
    yield counters(
        "warmpath_uncached_tokens",
        "Prompt tokens that had to be computed, by why; sums to prompt tokens minus delivered ones.",
        "reason",
        {reason.value: totals.uncached[reason] for reason in UncachedReason},
    )


def _loop(totals: LoopTotals, recent_share: float) -> Iterable[Metric]:
    yield histogram(
        "warmpath_match_error_blocks",
        "Blocks between expected and found, per request; le=1 over count = right to within a block.",
        ERROR_BOUNDS,
        totals.by_bound,
        totals.error_blocks,
    )
    yield GaugeMetricFamily(
        "warmpath_match_within_one_block_ratio",
        "Of the last 1000 requests, those whose match was right to within a block; 1 before any.",
        recent_share,
    )
    yield counters(
        "warmpath_missing_tokens",
        "Tokens expected and not found, by who had said they were there.",
        "said_by",
        {"replica": totals.missing_exact, "router": totals.missing_predicted},
    )
    yield CounterMetricFamily(
        "warmpath_unexpected_tokens", "Tokens found and not expected.", totals.unexpected
    )
    yield CounterMetricFamily(
        "warmpath_doubts", "Snapshots asked for because a replica kept breaking its word.", totals.doubts
    )


def _shadow(totals: ShadowTotals) -> Iterable[Metric]:
    yield counters(
        "warmpath_shadow_decisions",
        "Decisions a shadow policy took too, by whether it chose the same replica.",
        "agrees",
        {"true": totals.agreed, "false": totals.disagreed},
    )
    yield CounterMetricFamily(
        "warmpath_shadow_extra_seconds",
        "Cost of the shadow's choices above the live ones, by the live cost model.",
        totals.extra_s,
    )
    yield CounterMetricFamily(
        "warmpath_shadow_saved_seconds",
        "Cost of the shadow's choices below the live ones, by the live cost model.",
        totals.saved_s,
    )
    yield CounterMetricFamily("warmpath_shadow_spent_seconds", "Time the shadow took.", totals.spent_s)
    yield GaugeMetricFamily(
        "warmpath_shadow_failed", "1 once the shadow policy has raised and was switched off.", totals.failed
    )


def _recording(totals: RecordingTotals) -> Iterable[Metric]:
    yield counters(
        "warmpath_recorded_requests",
        "Requests for the recording: written; dropped (its queue was full); failed (its file could not be).",
        "outcome",
        {"written": totals.written, "dropped": totals.dropped, "failed": totals.failed},
    )
    yield CounterMetricFamily(
        "warmpath_recorded_requests_lost",
        "Of those written: their file was deleted before its end.",
        totals.lost,
    )
