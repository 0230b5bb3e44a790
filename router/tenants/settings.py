"""What deploy.yaml says of API keys and of who shares cached prefixes with whom.

Names places (files, environment variables) and reads the secret; holds neither keys nor secrets itself, so
it may be printed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cache.errors import ConfigError
from router.secret_file import check_path, read_secret, stripped

MIN_SECRET_CHARS = 32  # 128 bits as hexadecimal digits


class CacheScope(StrEnum):
    """Who may find whose cached prefixes."""

    SHARED = "shared"  # everybody, but for who sends a `cache_salt`
    TENANT = "tenant"  # requests of one tenant; a `cache_salt` divides a tenant's further
    REQUEST = "request"  # nobody, but one tenant's requests that send the same `cache_salt`


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """`tenants:` under the Router's settings. Paths are the Router node's."""

    keys_file: str | None = None  # YAML; read again when it changes
    keys_variable: str | None = None  # environment variable with the same YAML; fixed for the process's life
    cache_scope: str | None = None  # one of `CacheScope`; None = tenant with keys, shared without
    # What salts are derived with: the same for all Routers, or they would not find each other's prefixes.
    secret_file: str | None = None
    secret_variable: str | None = None

    def __post_init__(self) -> None:
        for first, second in (("keys_file", "keys_variable"), ("secret_file", "secret_variable")):
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise _error(second, getattr(self, second), f"cannot be set beside {first}")
        for name in ("keys_file", "secret_file"):
            path = getattr(self, name)
            if path is not None:
                check_path(f"tenants.{name}", path)
        if self.cache_scope is not None and self.cache_scope not in list(CacheScope):
            raise _error("cache_scope", self.cache_scope, "must be one of " + ", ".join(CacheScope))
        if self.scope is CacheScope.TENANT and not self.has_keys:
            raise _error(
                "cache_scope", self.cache_scope, "needs keys_file or keys_variable to tell tenants by"
            )
        if self.scope is not CacheScope.SHARED and self.secret_file is None and self.secret_variable is None:
            accepted = f"or secret_variable must be set with cache_scope {self.scope.value}"
            raise _error("secret_file", None, f"{accepted}; `python -m router key --secret` makes one")

    @property
    def has_keys(self) -> bool:
        return self.keys_file is not None or self.keys_variable is not None

    @property
    def scope(self) -> CacheScope:
        if self.cache_scope is not None:
            return CacheScope(self.cache_scope)
        return CacheScope.TENANT if self.has_keys else CacheScope.SHARED

    def read_secret(self, environment: Mapping[str, str] = os.environ) -> bytes | None:
        """The deployment's secret, surrounding white space removed; None where the scope needs none.

        Raises ConfigError, without showing it, if it is absent or too short to be one.
        """
        if self.scope is CacheScope.SHARED:
            return None
        if self.secret_variable is not None:
            secret = environment.get(self.secret_variable, "").encode()
            if not secret:
                accepted = "names an environment variable that is not set"
                raise _error("secret_variable", self.secret_variable, accepted)
            return stripped("tenants.secret_variable", secret, MIN_SECRET_CHARS)
        assert self.secret_file is not None
        return read_secret("tenants.secret_file", self.secret_file, MIN_SECRET_CHARS)


def _error(name: str, value: object, accepted: str) -> ConfigError:
    return ConfigError(f"tenants.{name}", value, accepted)
