"""From an `authorization` header to a request that may go on, or an error.

One hash and one look-up per request. Keeps what each key has left; forgets keys that are gone, so memory is
bounded by the key file. Knows headers' values and paths; knows no HTTP otherwise.
Owner: the router's event loop.
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.errors import InvalidApiKey, NotPermitted
from router.tenants.allowance import Allowance, Limit, Visit
from router.tenants.key_ring import KeyRing
from router.tenants.key_table import ApiKey, KeyTable

_PEERS_INTERVAL_S = 1.0  # how often this Router's place among the Routers is asked for

OPEN_PATHS = frozenset({"/health", "/live"})
"""Nothing is asked of who asks for these: probes have no key."""

_API_PATHS = frozenset({"/tokenize", "/detokenize", "/version", "/openapi.json"})
_API_PREFIX = "/v1/"

_BROWSED = "/dashboard"


def is_browsed(path: str) -> bool:
    """Whether people look at it with a browser, which sends a key as the password of Basic authentication."""
    return path == _BROWSED or path.startswith(f"{_BROWSED}/")


def is_api(path: str) -> bool:
    """Whether any key opens it. Whatever is not known to be the API is for operators: new pages too."""
    return path.startswith(_API_PREFIX) or path in _API_PATHS


def _key_in(authorization: Sequence[bytes], path: str) -> bytes | None:
    """The key that was sent; None if none was. Two headers might be read differently by a proxy and by us."""
    if len(authorization) != 1:
        return None
    scheme, _, given = authorization[0].partition(b" ")
    if scheme.lower() == b"bearer":
        return given.strip()
    if scheme.lower() == b"basic" and is_browsed(path):
        try:
            return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return None
    return None


@dataclass(frozen=True, slots=True)
class GateStatistics:
    """Since the start, but for `num_keys` and `are_stale`."""

    num_keys: int
    num_reloads: int
    num_failures: int  # times that the keys could not be read any more
    refusals: Counter[str]  # by `REFUSALS`
    are_stale: bool  # the keys: they have changed, and what they are now cannot be read


REFUSALS = ("missing", "unknown", "not_permitted", *(f"{limit.value}_limit" for limit in Limit))


class Gate:
    """Everybody who has a key, and what they have left."""

    def __init__(
        self, ring: KeyRing, *, peers: Callable[[], tuple[int, int]], clock: Callable[[], float]
    ) -> None:
        """peers: this Router's place among the Routers, and their number."""
        self._ring = ring
        self._peers = peers
        self._clock = clock
        self._allowances: dict[str, Allowance] = {}
        self._pruned_for: KeyTable = ring.table
        self._place = (0, 1)
        self._ask_peers_at = clock()
        self._refusals = Counter(dict.fromkeys(REFUSALS, 0))

    def authenticate(self, authorization: Sequence[bytes], path: str) -> ApiKey:
        """Whose request it is. authorization: the values of all headers of that name.

        Raises InvalidApiKey, or NotPermitted if the path is for operators.
        """
        given = _key_in(authorization, path)
        if given is None:
            self._refusals["missing"] += 1
            raise InvalidApiKey()
        key = self._ring.table.find(given)
        if key is None:
            self._refusals["unknown"] += 1
            raise InvalidApiKey()
        if not key.is_operator and not is_api(path):
            self._refusals["not_permitted"] += 1
            raise NotPermitted()
        return key

    def enter(self, key: ApiKey) -> Visit:
        """A request that has computing done. Close it. Raises RateLimitExceeded."""
        allowance = self._allowance(key)
        allowance.enter()
        return Visit(key, allowance)

    def of_owner(self, owner: str) -> ApiKey | None:
        """See `KeyTable.of_owner`."""
        return self._ring.table.of_owner(owner)

    def limits_left(self, key: ApiKey) -> dict[str, str]:
        """The headers of `Allowance.headers`."""
        return self._allowance(key).headers()

    def statistics(self) -> GateStatistics:
        ring = self._ring
        return GateStatistics(
            len(ring.table), ring.num_reloads, ring.num_failures, self._refusals.copy(), ring.is_stale
        )

    def _allowance(self, key: ApiKey) -> Allowance:
        self._prune()
        allowance = self._allowances.get(key.name)
        if allowance is None:
            allowance = self._allowances[key.name] = Allowance(self._clock, self._count)
        allowance.fit(key.limits, *self._place_now())
        return allowance

    def _prune(self) -> None:
        """After the keys have changed: those of before that are gone and have nothing running."""
        table = self._ring.table
        if table is not self._pruned_for:
            self._pruned_for = table
            gone = [name for name in self._allowances if name not in table.names]
            for name in gone:
                del self._allowances[name]  # its visits still hold it, and close it

    def _place_now(self) -> tuple[int, int]:
        now = self._clock()
        if now >= self._ask_peers_at:
            self._ask_peers_at = now + _PEERS_INTERVAL_S
            self._place = self._peers()
        return self._place

    def _count(self, limit: Limit) -> None:
        self._refusals[f"{limit.value}_limit"] += 1
