"""Which requests are too late, and what their clients are told of it. Pure: times are the engine clock's."""

from __future__ import annotations

from collections.abc import Sequence

from cache.errors import DeadlineExceeded
from replica.scheduling.request import Request


def too_late(requests: Sequence[Request], now_s: float) -> list[Request]:
    """Those whose time has run out. requests: all that are here, in any order.

    Or will have when its prompt is computed, by what steps take: of those that have never begun. One of these
    is begun all the same if nobody else is here. It keeps nobody from anything, and what steps take is
    learned from steps: believed to be too slow for every deadline, the engine would never begin again.
    """
    late = [r for r in requests if r.expires_s is not None and now_s >= _latest_s(r)]
    return _without_first(late, now_s) if len(late) == len(requests) else late


def deadline_exceeded(request: Request, now_s: float) -> DeadlineExceeded:
    """request: one that is too late."""
    expires_s = request.expires_s
    assert expires_s is not None
    prefill_s = expires_s - request.starts_by_s if now_s < expires_s else None
    return DeadlineExceeded(expires_s - request.arrival_s, now_s - request.arrival_s, prefill_s)


def _latest_s(request: Request) -> float:
    """When it is too late for it, if nothing happens before; engine clock."""
    assert request.expires_s is not None
    return (
        request.expires_s if request.admitted_s is not None else min(request.expires_s, request.starts_by_s)
    )


def _without_first(late: Sequence[Request], now_s: float) -> list[Request]:
    """Without the first whose time has not run out yet, and those that follow it."""
    in_time = [r for r in late if r.expires_s is not None and now_s < r.expires_s]
    if not in_time:
        return list(late)
    first = min(in_time, key=lambda r: r.place)
    return [r for r in late if r is not first and r not in first.followers]
