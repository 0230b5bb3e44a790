"""Keys, limits and salts put together: what starts, what refuses to, and what ends with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cache.errors import ConfigError
from router.tenants.settings import CacheScope, TenantSettings
from router.tenants.tenancy import GateCollector, Tenancy, check_settings
from tests.fakes.keys import entry, key_file

ENVIRONMENT = {"KEYS": key_file(entry("a")), "SECRET": "0123456789abcdef" * 2}
SETTINGS = TenantSettings(keys_variable="KEYS", secret_variable="SECRET")


def tenancy(settings: TenantSettings, environment: dict[str, str]) -> Tenancy:
    return Tenancy(settings, peers=lambda: (0, 1), clock=lambda: 0.0, environment=environment)


async def test_without_settings_there_is_no_gate_and_one_cache() -> None:
    made = tenancy(TenantSettings(), {})
    assert (made.gate, made.salts.scope) == (None, CacheScope.SHARED)
    await made.aclose()


async def test_with_keys_there_is_a_gate_and_a_cache_per_tenant() -> None:
    made = tenancy(SETTINGS, ENVIRONMENT)
    assert made.gate is not None
    assert made.salts.salt("a", None) != made.salts.salt("b", None)
    await made.aclose()
    await made.aclose()


async def test_the_watch_ends_with_it(tmp_path: Any) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(ENVIRONMENT["KEYS"])
    before = asyncio.all_tasks()
    made = tenancy(TenantSettings(keys_file=str(path), cache_scope="shared"), {})
    assert len(asyncio.all_tasks() - before) == 1
    await made.aclose()
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("missing", ["KEYS", "SECRET"])
async def test_nothing_starts_without_its_keys_or_its_secret(missing: str) -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != missing}
    with pytest.raises(ConfigError, match="is not set"):
        tenancy(SETTINGS, environment)
    with pytest.raises(ConfigError, match="is not set"):
        check_settings(SETTINGS, environment)
    check_settings(SETTINGS, ENVIRONMENT)


async def test_every_reason_has_a_series_from_the_start() -> None:
    made = tenancy(SETTINGS, ENVIRONMENT)
    assert made.gate is not None
    families = {family.name: family for family in GateCollector(made.gate.statistics).collect()}
    counted = {sample.labels["why"]: sample.value for sample in families["warmpath_key_refusals"].samples}
    assert counted == dict.fromkeys(
        ("missing", "unknown", "not_permitted", "requests_limit", "tokens_limit", "concurrency_limit"), 0
    )
    await made.aclose()
