"""Where streamed answers went shows in a scrape, and nothing shows that has not happened."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from router.bodies.body_channel import BodyStatistics, proxies_take_bodies
from router.bodies.body_metrics import BodyCollector

CALLBACK = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deploy.proxy.middlewares"}


def test_both_ways_are_counted() -> None:
    statistics, registry = BodyStatistics(), CollectorRegistry()
    registry.register(BodyCollector(lambda: statistics))
    statistics.by_channel, statistics.by_call = 3, 1
    for way, number in (("channel", 3), ("call", 1)):
        assert registry.get_sample_value("warmpath_body_streams_total", {"way": way}) == number


def test_only_pythons_proxy_with_our_middlewares_takes_them() -> None:
    assert proxies_take_bodies(CALLBACK)
    assert not proxies_take_bodies({})
    assert not proxies_take_bodies({**CALLBACK, "RAY_SERVE_ENABLE_HA_PROXY": "1"})
    assert not proxies_take_bodies({**CALLBACK, "RAY_USE_TLS": "1"})
    assert not proxies_take_bodies({**CALLBACK, "RAY_USE_TLS": "True"})
