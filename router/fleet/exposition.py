"""Series as Prometheus' text format, those of one metric together however many Routers they come from.

`prometheus_client` writes the same format in three times the time, sorting labels on the way: 100 ms for a
fleet of 64 replicas, which has 20,000 lines. A test reads what this writes with its parser.
Knows the format; knows neither where series come from nor what they mean. Any thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from router.fleet.report import Family, Series

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SPECIAL = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_SPECIAL_IN_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})


def merged(families: Iterable[Family]) -> list[Family]:
    """One family per name, in order of first appearance: the format allows each name one block.

    Of two Routers whose versions differ, the first one's text and kind stand; series of another kind are
    left out, since no scraper would take both.
    """
    firsts: dict[str, Family] = {}
    series: dict[str, list[Series]] = {}
    for family in families:
        first = firsts.setdefault(family.name, family)
        if first.kind == family.kind:
            series.setdefault(family.name, []).extend(family.series)
    return [
        Family(name, first.documentation, first.kind, tuple(series[name])) for name, first in firsts.items()
    ]


def text(families: Iterable[Family]) -> bytes:
    """The exposition. About a microsecond per series: off the event loop where there are many."""
    lines: list[str] = []
    for family in families:
        # A counter's lines all end in _total, and so does the name of its block.
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        lines.append(f"# HELP {name} {family.documentation.translate(_SPECIAL_IN_HELP)}")
        lines.append(f"# TYPE {name} {family.kind}")
        lines += [f"{s.name}{_braced(s.labels)} {_number(s.value)}" for s in family.series]
    lines.append("")
    return "\n".join(lines).encode()


def _braced(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    parts = [f'{name}="{value.translate(_SPECIAL)}"' for name, value in labels.items()]
    return "{" + ",".join(parts) + "}"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
