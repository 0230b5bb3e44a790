"""Files that settings name: where they may be, and the secrets that they hold.

Errors name the setting and never show what is in its file. Knows neither what a secret is for nor who asks.
"""

from __future__ import annotations

from pathlib import Path

from cache.errors import HIDDEN, ConfigError

_MAX_BYTES = 4096


def check_path(setting: str, path: str) -> None:
    """Raises ConfigError for one that depends on where the process runs."""
    if not Path(path).is_absolute():
        raise ConfigError(setting, path, "must be an absolute path: Routers run in folders of Ray's")


def read_secret(setting: str, path: str, least_chars: int) -> bytes:
    """What it holds, without white space around it. Raises ConfigError if it cannot be read or is short."""
    try:
        with Path(path).open("rb") as file:
            found = file.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(setting, path, f"cannot be read ({error.strerror})") from None
    return stripped(setting, found, least_chars)


def stripped(setting: str, secret: bytes, least_chars: int) -> bytes:
    """The secret without white space around it. Raises ConfigError if that is too short to be one."""
    secret = secret.strip()
    if len(secret) < least_chars:
        raise ConfigError(setting, HIDDEN, f"must hold at least {least_chars} characters")
    return secret
