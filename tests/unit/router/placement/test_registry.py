"""A process finds its Routing by name."""

from __future__ import annotations

import pytest

from router.placement.registry import get_routing, register_routing, unregister_routing
from router.placement.routing import Routing
from tests.fakes.router import config


def test_one_routing_per_name() -> None:
    routing = Routing(config())
    register_routing("here", routing)
    try:
        register_routing("here", routing)
        assert get_routing("here") is routing
        with pytest.raises(ValueError, match="here"):
            register_routing("here", Routing(config()))
    finally:
        unregister_routing("here")
        unregister_routing("here")
    with pytest.raises(LookupError, match="here"):
        get_routing("here")
