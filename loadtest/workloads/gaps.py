"""How long a trace may be silent. If it is for longer, a clock was wrong, or what was put together does not
belong together. Knows lines; knows no format."""

from __future__ import annotations

from loadtest.workloads.json_lines import Line

MAX_GAP_S = 31 * 86_400.0


def check_gap(line: Line, field: str, gap_s: float) -> None:
    """line, field: where the later request's time is. Raises TraceError."""
    if gap_s > MAX_GAP_S:
        raise line.error(
            field,
            f"comes {gap_s / 86_400:,.0f} days after the request before it, more than "
            f"{MAX_GAP_S / 86_400:g}: is a clock wrong, or are recordings of different times put together?",
        )
