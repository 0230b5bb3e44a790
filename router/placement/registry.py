"""One `Routing` per process and deployment, found by name: what a process shares between its HTTP side and
Serve's routing hook.

Serve ships the module of a routing hook by value but imports this one by reference, so both sides of a
process find the same object here. Event loop only.
"""

from __future__ import annotations

from router.placement.routing import Routing

_routings: dict[str, Routing] = {}


def register_routing(key: str, routing: Routing) -> None:
    """Make `routing` findable under `key`. Raises ValueError if another one is registered there."""
    if _routings.setdefault(key, routing) is not routing:
        raise ValueError(f"another Routing is registered as {key!r}")


def unregister_routing(key: str) -> None:
    """Inverse of `register_routing`. Idempotent."""
    _routings.pop(key, None)


def get_routing(key: str) -> Routing:
    """The registered Routing. Raises LookupError: whoever opens the handle must register first."""
    try:
        return _routings[key]
    except KeyError:
        raise LookupError(f"no Routing is registered as {key!r} in this process") from None
