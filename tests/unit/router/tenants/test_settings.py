"""`tenants:` in deploy.yaml: what goes together, and where the secret comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cache.errors import ConfigError
from router.tenants.settings import CacheScope, TenantSettings

SECRET = "0123456789abcdef" * 2
KEYS = {"keys_file": "/etc/keys.yaml"}


def test_without_keys_all_is_shared_and_no_secret_is_needed() -> None:
    settings = TenantSettings()
    assert (settings.has_keys, settings.scope, settings.read_secret({})) == (False, CacheScope.SHARED, None)


def test_with_keys_tenants_are_kept_apart() -> None:
    settings = TenantSettings(**KEYS, secret_variable="SECRET")
    assert settings.scope is CacheScope.TENANT
    assert settings.read_secret({"SECRET": f" {SECRET}\n"}) == SECRET.encode()


def test_keys_may_be_asked_for_and_caches_shared_all_the_same() -> None:
    settings = TenantSettings(**KEYS, cache_scope="shared")
    assert (settings.has_keys, settings.scope, settings.read_secret({})) == (True, CacheScope.SHARED, None)


def test_requests_can_be_kept_apart_without_keys() -> None:
    assert TenantSettings(cache_scope="request", secret_variable="S").scope is CacheScope.REQUEST


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({**KEYS, "keys_variable": "KEYS", "cache_scope": "shared"}, "keys_variable"),
        ({**KEYS, "secret_file": "/s", "secret_variable": "S"}, "secret_variable"),
        ({"keys_file": "keys.yaml", "secret_variable": "S"}, "keys_file"),
        ({**KEYS, "secret_file": "secret"}, "secret_file"),
        ({**KEYS, "cache_scope": "user"}, "cache_scope"),
        ({"cache_scope": "tenant", "secret_variable": "S"}, "cache_scope"),
        (KEYS, "secret_file"),  # or every Router would have salts of its own
        ({"cache_scope": "request"}, "secret_file"),
    ],
)
def test_what_does_not_go_together_is_named(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TenantSettings(**settings)
    assert caught.value.field == f"tenants.{field}"


@pytest.mark.parametrize(
    ("content", "accepted"), [("short", "at least 32"), ("", "at least 32"), (None, "cannot be read")]
)
def test_a_secret_that_is_none_is_refused_unseen(tmp_path: Path, content: str | None, accepted: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=accepted) as caught:
        TenantSettings(**KEYS, secret_file=str(path)).read_secret({})
    assert "short" not in str(caught.value)


@pytest.mark.parametrize("environment", [{}, {"S": ""}])
def test_a_variable_that_is_not_set_is_named(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="is not set"):
        TenantSettings(**KEYS, secret_variable="S").read_secret(environment)


def test_a_secret_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    assert TenantSettings(**KEYS, secret_file=str(path)).read_secret({}) == SECRET.encode()
