"""The key file: who may use the service, and how much of it.

    keys:
      - name: alice-laptop        # in logs; unique
        tenant: alice             # whose cache it uses; left out: the name
        sha256: 9f86d081884c7d65… # of the key, 64 hexadecimal digits; a list while a key is being replaced
        share: 2                  # its tenant's, beside other tenants' of 1; the same in all keys of a tenant
        priority: 0               # the least, so the most urgent, that it may ask for
        operator: false           # may also read /metrics, /debug and whatever else is not the API
        limits: {requests_per_minute: 600, tokens_per_minute: 200000, max_concurrent: 32, prefixes: 4}

Knows the file's text; knows neither where it is nor any key. Errors name field, value and range, and never
show a digest: somebody may have put the key itself in its place.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from cache.errors import HIDDEN, ConfigError
from cache.priority import MAX_PRIORITY, MIN_PRIORITY
from router.tenants.api_key import MAX_KEY_BYTES, digest_of

MAX_KEYS = 10_000  # each has its own limits in every Router's memory: about 1 KB
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # it goes into log lines
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_MAX_DEPTH = 8  # four are needed
# libyaml's parser is ten times faster and not everywhere.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may take from all Routers together. None = as much as there is."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts, cached ones too, and of answers
    max_concurrent: int | None = None  # prompts being answered: a batch counts as many as it has
    # Of prefixes that are held for it; None = what `limits:` of the Router's settings says.
    prefixes: int | None = None
    prefix_tokens: int | None = None  # each copy counted


_LIMIT_RANGES = {
    "requests_per_minute": (1, 10_000_000),
    "tokens_per_minute": (1, 1_000_000_000_000),
    "max_concurrent": (1, 1_000_000),
    "prefixes": (0, 1_000_000),
    "prefix_tokens": (0, 1_000_000_000_000),
}


_SHARES = (0.01, 100.0)
_PRIORITIES = (MIN_PRIORITY, MAX_PRIORITY)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is known of a key: everything but the key."""

    name: str
    tenant: str
    is_operator: bool = False
    limits: KeyLimits = field(default_factory=KeyLimits)
    share: float = 1.0  # of the replicas' work, beside other tenants'
    priority: int = 0  # of its requests the most urgent; below 0 before those of other keys of its tenant

    @property
    def owner(self) -> str:
        """What names its prefixes to replicas and Routers; "" where nobody needs a key."""
        name = self.name.encode()
        return hashlib.sha256(b"warmpath owner " + name).hexdigest()[:32] if name else ""


class KeyTable:
    """The keys of one reading of the file. Immutable."""

    __slots__ = ("_by_digest", "_by_owner", "names")

    def __init__(self, by_digest: Mapping[bytes, ApiKey]) -> None:
        self._by_digest = {digest: (digest, key) for digest, key in by_digest.items()}
        self._by_owner = {key.owner: key for key in by_digest.values()}
        self.names = frozenset(key.name for key in by_digest.values())

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, key: bytes) -> ApiKey | None:
        """Whose key it is; None if nobody's. O(1).

        The time it takes tells at most how a digest compares with others, and a digest cannot be steered:
        nobody gets closer to a key by it. The last word is a comparison in constant time all the same.
        """
        if len(key) > MAX_KEY_BYTES:
            return None
        digest = digest_of(key)
        found = self._by_digest.get(digest)
        if found is None or not hmac.compare_digest(found[0], digest):
            return None
        return found[1]

    def of_owner(self, owner: str) -> ApiKey | None:
        """Whose prefixes are named so; None: no key's that works. O(1)."""
        return self._by_owner.get(owner)


def parse_keys(text: str) -> KeyTable:
    """The key file's content. Raises ConfigError for anything in it that is not as described above."""
    try:
        _check_shape(text)
        content = yaml.load(text, _LOADER)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date there cannot be
        raise ConfigError("keys", HIDDEN, f"is not YAML{_place(error)}") from None
    # An empty list says that no key works; an empty file, that somebody is still writing it.
    if not isinstance(content, dict) or not isinstance(content.get("keys"), list):
        raise ConfigError("keys", HIDDEN, "must be a list under `keys:`")
    _refuse_unknown("", content, ("keys",))
    entries = content["keys"]
    if len(entries) > MAX_KEYS:
        raise ConfigError("keys", f"{len(entries)} entries", f"must have at most {MAX_KEYS}")
    by_digest: dict[bytes, ApiKey] = {}
    names: set[str] = set()
    shares: dict[str, float] = {}  # by tenant
    for index, entry in enumerate(entries):
        where = f"keys[{index}]"
        key, digests = _entry(where, entry)
        if key.name in names:
            raise ConfigError(f"{where}.name", key.name, "must be unique")
        names.add(key.name)
        if shares.setdefault(key.tenant, key.share) != key.share:
            first = f"{shares[key.tenant]:g}, as in other keys of this tenant"
            raise ConfigError(f"{where}.share", key.share, f"must be {first}")
        for digest in digests:
            if digest in by_digest:
                raise ConfigError(f"{where}.sha256", HIDDEN, f"is also {by_digest[digest].name}'s")
            by_digest[digest] = key
    return KeyTable(by_digest)


def _check_shape(text: str) -> None:
    """Raises ConfigError for what is nested as no key file is: libyaml would end the process over it. And
    for a key that a mapping has twice: PyYAML takes the last, and the first's content is gone in silence."""
    unclosed: list[_Collection] = []
    for event in yaml.parse(text, _LOADER):
        if isinstance(event, yaml.CollectionEndEvent):
            unclosed.pop()
        elif isinstance(event, yaml.NodeEvent):
            if unclosed and unclosed[-1].has_twice(event):
                again = "" if event.start_mark is None else f", again at line {event.start_mark.line + 1}"
                raise ConfigError("keys", HIDDEN, f"has a key of a mapping twice{again}")
            if isinstance(event, yaml.CollectionStartEvent):
                unclosed.append(_Collection(is_mapping=isinstance(event, yaml.MappingStartEvent)))
        if len(unclosed) > _MAX_DEPTH:
            raise ConfigError("keys", HIDDEN, "is nested deeper than a key file can be")


class _Collection:
    """One that is being read. In a mapping every other node is a key."""

    def __init__(self, *, is_mapping: bool) -> None:
        self._is_mapping = is_mapping
        self._is_key = False
        self._keys: set[str] = set()

    def has_twice(self, event: yaml.NodeEvent) -> bool:
        """Whether this, the next node in it, is a key that it has."""
        self._is_key = self._is_mapping and not self._is_key
        if not self._is_key or not isinstance(event, yaml.ScalarEvent):
            return False
        is_there = event.value in self._keys
        self._keys.add(event.value)
        return is_there


def _entry(where: str, entry: Any) -> tuple[ApiKey, list[bytes]]:
    if not isinstance(entry, dict):
        raise ConfigError(where, HIDDEN, "must be a mapping with name and sha256")
    _refuse_unknown(where, entry, ("name", "tenant", "sha256", "operator", "limits", "share", "priority"))
    name = _name(f"{where}.name", entry.get("name"))
    tenant = _name(f"{where}.tenant", entry["tenant"]) if "tenant" in entry else name
    is_operator = entry.get("operator", False)
    if not isinstance(is_operator, bool):
        raise ConfigError(f"{where}.operator", is_operator, "must be true or false")
    limits = _limits(f"{where}.limits", entry.get("limits", {}))
    share = _number(f"{where}.share", entry.get("share", 1), _SHARES, whole=False)
    priority = int(_number(f"{where}.priority", entry.get("priority", 0), _PRIORITIES, whole=True))
    key = ApiKey(name, tenant, is_operator, limits, share, priority)
    return key, _digests(f"{where}.sha256", entry.get("sha256"))


def _number(where: str, value: Any, bounds: tuple[float, float], *, whole: bool) -> float:
    low, high = bounds
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        kind = "an integer" if whole else "a number"
        raise ConfigError(where, value, f"must be {kind} between {low:g} and {high:g}")
    return float(value)


def _name(where: str, value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        quoted = "" if isinstance(value, str) else ", in quotes where YAML takes them for something else"
        accepted = f"must be 1 to 64 letters, digits, dots, dashes or underscores{quoted}"
        raise ConfigError(where, value, accepted)
    return value


def _digests(where: str, value: Any) -> list[bytes]:
    digests = value if isinstance(value, list) else [value]
    if not digests or not all(isinstance(each, str) and _DIGEST.fullmatch(each) for each in digests):
        accepted = "must be the key's SHA-256 as 64 hexadecimal digits in quotes, or a list of such"
        raise ConfigError(where, HIDDEN, accepted)
    return [bytes.fromhex(each) for each in digests]


def _limits(where: str, value: Any) -> KeyLimits:
    if not isinstance(value, dict):
        raise ConfigError(where, value, "must be a mapping")
    names = tuple(each.name for each in fields(KeyLimits))
    _refuse_unknown(where, value, names)
    for name, limit in value.items():
        low, high = _LIMIT_RANGES[name]
        if isinstance(limit, bool) or not isinstance(limit, int) or not low <= limit <= high:
            raise ConfigError(f"{where}.{name}", limit, f"must be an integer between {low} and {high}")
    return KeyLimits(**value)


def _refuse_unknown(where: str, mapping: Mapping[Any, Any], known: Collection[str]) -> None:
    for name in mapping:
        if name not in known:
            place = f"{where}." if where else ""
            raise ConfigError(f"{place}{str(name)[:64]}", HIDDEN, "is unknown: use " + ", ".join(known))


def _place(error: Exception) -> str:
    """Where it went wrong; the parser's own words would quote the line."""
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
