"""Who holds which pins, and who has room for more: read from the replicas' latest reports.

An engine reports at once when what it holds changes, before it answers whoever asked for that; so a Router
that hears all replicas knows all pins, whichever of the Routers they came through. Pure functions of values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from cache.engine_report import EngineReport
from cache.types import PinId, ReplicaId
from router.fleet.engine_series import EngineView
from router.prefixes.prefix import PinnedPrefix

Engines = Mapping[ReplicaId, EngineView]


def holdings(engines: Engines) -> dict[PinId, PinnedPrefix]:
    """Every pin that some replica holds, oldest first; replicas by name. O(pins)."""
    found: dict[PinId, PinnedPrefix] = {}
    for replica_id, view in sorted(engines.items()):
        for held in view.report.pins if view.report is not None else ():
            known = found.get(held.pin_id)
            found[held.pin_id] = (
                PinnedPrefix(
                    held.pin_id,
                    held.owner,
                    held.num_blocks,
                    held.copies,
                    (replica_id,),
                    held.created_at,
                    held.expires_at,
                    held.keeper,
                )
                if known is None
                else replace(known, replicas=(*known.replicas, replica_id))
            )
    return dict(sorted(found.items(), key=lambda item: (item[1].created_at, item[0])))


def holds(report: EngineReport, pin_id: PinId) -> bool:
    return any(held.pin_id == pin_id for held in report.pins)


def room(report: EngineReport) -> int:
    """Blocks that further pins may take there."""
    return max(0, report.max_pinned_blocks - report.pinned_blocks)


def roomiest(engines: Engines, without: Collection[ReplicaId]) -> int:
    """The most blocks that pins may still take on one of the other replicas; 0 if there is none."""
    reports = [view.report for name, view in engines.items() if name not in without]
    return max((room(report) for report in reports if report is not None), default=0)
