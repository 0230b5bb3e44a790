"""From who asks and what they ask for to the salt of their block hashes.

    shared    the body's `cache_salt`, or none
    tenant    HMAC-SHA256(secret, tenant, body's `cache_salt`, or none)
    request   the same with a `cache_salt`; without one a salt nobody has had before

The salt goes where every salt goes: into the root of the prompt's hashes, which the engine derives again
from the request it is sent, into what is kept of tokenized texts, and before the text that other policies
place by.
Keyed, so that nobody who reaches a replica or reads events can compute a tenant's hashes from its name.
Knows names and salts; knows no prompts.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable

from router.tenants.settings import CacheScope

_TAG = b"warmpath cache salt 1"


class CacheSalts:
    """Stateless but for what it draws."""

    def __init__(
        self,
        scope: CacheScope = CacheScope.SHARED,
        secret: bytes | None = None,
        draw: Callable[[], str] = lambda: secrets.token_hex(32),
    ) -> None:
        """secret: of the deployment; None only where all is shared. draw: a salt never drawn before."""
        assert secret or scope is CacheScope.SHARED, "salts without a secret could be computed by anybody"
        self.scope = scope
        self._secret = secret or b""
        self._draw = draw

    def salt(self, tenant: str, asked: str | None) -> str:
        """Of one request; all its prompts and attempts have the same. asked: the body's `cache_salt`."""
        if self.scope is CacheScope.SHARED:
            return asked or ""
        if self.scope is CacheScope.REQUEST and not asked:
            return self._draw()
        message = b"".join(_prefixed(text) for text in (tenant, asked or ""))
        return hmac.digest(self._secret, _TAG + message, "sha256").hex()


def _prefixed(text: str) -> bytes:
    """Unambiguous when put together: length, then content."""
    content = text.encode("utf-8", "surrogatepass")
    return len(content).to_bytes(4, "little") + content
