"""Key files for tests."""

from __future__ import annotations

from typing import Any

import yaml

from router.tenants.api_key import digest_of


def digest(key: str) -> str:
    return digest_of(key.encode()).hex()


def entry(name: str, key: str | None = None, **fields: Any) -> dict[str, Any]:
    """One key's; the key is "key of <name>" unless it is given."""
    return {"name": name, "sha256": digest(key or f"key of {name}"), **fields}


def key_file(*entries: dict[str, Any]) -> str:
    return yaml.safe_dump({"keys": list(entries)}, sort_keys=False)
