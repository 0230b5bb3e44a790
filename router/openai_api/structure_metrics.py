"""What this Router has done about structured output, as series. What engines do, they tell themselves."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric

from router.openai_api.answer_form import FormStatistics
from router.openai_api.structure_check import TRIED_BOUNDS_S
from router.scraped import Scraped, counters, histogram


class StructureCollector(Scraped[FormStatistics]):
    """Reads what was counted when scraped."""

    def families(self, numbers: FormStatistics) -> Iterable[Metric]:
        yield counters(
            "warmpath_structured_requests",
            "Requests whose answer had to have a structure, by its kind.",
            "kind",
            {kind.value: number for kind, number in numbers.requests.items()},
        )
        checks = numbers.checks
        yield counters(
            "warmpath_structures_checked",
            "Structures tried before anything was queued for them, those remembered not; by what was found.",
            "verdict",
            {"followed": checks.num_followed, "refused": checks.num_refused},
        )
        yield GaugeMetricFamily(
            "warmpath_structures_pending", "Structures that wait to be tried, or are.", checks.num_pending
        )
        yield histogram(
            "warmpath_structure_check_seconds",
            "To try one structure.",
            TRIED_BOUNDS_S,
            checks.tried_s.counts,
            checks.tried_s.total,
        )
