"""`args` of deploy.yaml, checked: one typed value, or an error naming key, value and accepted range.

Reads mappings; knows no files, no Ray, no torch. Settings that both sides need (model, block size,
hash) are given once here, so that Router and replicas cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date
from enum import Enum
from typing import Any, get_args, get_type_hints

import msgspec

from cache.errors import HIDDEN, ConfigError
from cache.fingerprint import Fingerprint, HashAlgorithm
from deploy.errors import UnknownKey
from deploy.traces import check_exporter
from replica.config import ReplicaConfig
from router.config import RouterConfig
from router.tenants.settings import TenantSettings

ROUTER_KEYS_FROM_DEPLOY = frozenset(
    {"model_name", "tokenizer", "tokenizer_revision", "fingerprint", "model_sampling"}
)
"""`RouterConfig` fields that follow from the replicas' settings: not to be set twice."""


@dataclass(frozen=True, slots=True)
class AppConfig:
    """One deployment: what replicas run, and how the Router places."""

    replica: ReplicaConfig = field(default_factory=ReplicaConfig)
    router: Mapping[str, Any] = field(default_factory=dict)  # RouterConfig's own fields, checked

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> AppConfig:
        """Build from deploy.yaml's `args`. Raises ConfigError or UnknownKey."""
        refuse_unknown("args", args, {"replica", "router"})
        replica = _section("args.replica", args.get("replica"), ReplicaConfig, frozenset())
        router = _section("args.router", args.get("router"), RouterConfig, ROUTER_KEYS_FROM_DEPLOY)
        if _tenants(router).has_keys:
            # Hits compare tokens whatever the hash; this keeps one tenant from misleading others' placement.
            replica.setdefault("hash_algorithm", HashAlgorithm.SHA256)
        config = cls(replica=_build("args.replica", ReplicaConfig, replica), router=router)
        check_exporter(config.router_sketch().traces, "args.router.traces")  # and its ranges, now
        return config

    def router_sketch(self, **derived: Any) -> RouterConfig:
        """The Router's config but for what follows from the model and is not given. Raises ConfigError."""
        nothing = Fingerprint("", "", "", "", self.replica.block_size, self.replica.hash_algorithm)
        return router_config(self, **{"model_name": "", "tokenizer": "", "fingerprint": nothing, **derived})

    @property
    def tenants(self) -> TenantSettings:
        return _tenants(self.router)

    @property
    def model_name(self) -> str:
        return self.replica.model_name or self.replica.model


def router_config(config: AppConfig, **derived: Any) -> RouterConfig:
    """The Router's whole config, once model and fingerprint are known."""
    built: RouterConfig = _build("args.router", RouterConfig, {**config.router, **derived})
    return built


def _tenants(router: Mapping[str, Any]) -> TenantSettings:
    tenants: TenantSettings = router.get("tenants", TenantSettings())
    return tenants


def _section(
    where: str, value: Any, kind: type[ReplicaConfig] | type[RouterConfig], derived: frozenset[str]
) -> dict[str, Any]:
    """One mapping of settings with each value converted to its field's type."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(where, value, "must be a mapping of settings")
    refuse_unknown(where, value, {each.name for each in fields(kind)} - derived)
    return converted(where, value, kind)


def converted(where: str, settings: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Each setting of a dataclass as its field's type. Raises ConfigError, or UnknownKey in a section."""
    hints = get_type_hints(kind)
    secret = {each.name for each in fields(kind) if not each.repr}
    return {
        key: _convert(f"{where}.{key}", item, hints[key], is_secret=key in secret)
        for key, item in settings.items()
    }


def section_of(kind: Any) -> Any:
    """The dataclass among a setting's types, whose fields are settings in turn; None if there is none."""
    return next((each for each in (kind, *get_args(kind)) if is_dataclass(each)), None)


def _convert(where: str, value: Any, kind: Any, *, is_secret: bool) -> Any:
    """Strictly: 16 is no string and "16" no number; an integer may stand for a float."""
    section = section_of(kind)
    if isinstance(value, Mapping) and section is not None:
        refuse_unknown(where, value, section.__dataclass_fields__)
        value = converted(where, value, section)
    try:
        return msgspec.convert(value, kind, strict=True)
    except ConfigError as error:  # a section checks itself, and names its fields from its owner's place on
        raise ConfigError(f"{where.rpartition('.')[0]}.{error.field}", error.value, error.accepted) from None
    except msgspec.ValidationError as error:
        if isinstance(kind, type) and issubclass(kind, Enum):
            raise ConfigError(where, value, "must be one of " + ", ".join(kind)) from None
        # Of a section, which lacks a setting, the names alone: some of the settings may be secrets.
        shown = HIDDEN if is_secret else list(value) if isinstance(value, Mapping) else value
        raise ConfigError(where, shown, f"{error}{_advice(value, kind)}") from None


def _advice(value: Any, kind: Any) -> str:
    """How text is written that YAML takes for something else, and infinity, which it takes for text."""
    kinds = (kind, *get_args(kind))
    if isinstance(value, str):
        is_infinity = value.lower() in ("inf", "+inf", "infinity")
        return "; YAML writes infinity as .inf" if is_infinity and float in kinds else ""
    if str not in kinds or bool in kinds:
        return ""
    if isinstance(value, bool):
        return "; put it in quotes: YAML takes on, off, yes and no for true and false"
    return "; put it in quotes" if isinstance(value, int | float | date) else ""


def _build(where: str, kind: Any, settings: Mapping[str, Any]) -> Any:
    try:
        return kind(**settings)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error.field}", error.value, error.accepted) from None


def refuse_unknown(where: str, value: Mapping[str, Any], known: Any) -> None:
    """Raises UnknownKey for the first key that is none of these."""
    for key in value:
        if key not in known:
            raise UnknownKey(where, str(key), known)
