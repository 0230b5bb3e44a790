"""The keys that work now, and how they change without a restart.

The file is looked at every second; what is read once its stamp (inode, size, time of change) has been the
same at two looks replaces the keys at once and whole. A file that cannot be read or is wrong leaves the keys
as they are: one line in the log when that begins, one when it ends.
Knows files and environment variables; knows no requests. Reading happens on a thread, replacing on the event
loop that owns this.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from cache.errors import ConfigError
from router.tenants.key_table import KeyTable, parse_keys
from router.tenants.settings import TenantSettings

LOOK_INTERVAL_S = 1.0
MAX_FILE_BYTES = 8 << 20  # ten thousand keys with every field

logger = logging.getLogger(__name__)


class Stamp(NamedTuple):
    """Changes whenever a file's content does, replaced files and swapped links included."""

    device: int
    inode: int
    num_bytes: int
    changed_ns: int


class KeySource(Protocol):
    """Where keys are written. Both methods may block."""

    def stamp(self) -> Stamp | None:
        """Raises OSError. None: it never changes."""

    def read(self) -> str:
        """The YAML. Raises OSError or ConfigError."""


@dataclass(frozen=True, slots=True)
class KeyFile:
    path: str

    def stamp(self) -> Stamp:
        found = Path(self.path).stat()  # follows links: Kubernetes swaps one to change a mounted secret
        # Not the time of modification, which whoever writes may set: `cp -p` and `rsync -t` do.
        return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns)

    def read(self) -> str:
        with Path(self.path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError("keys", f"more than {MAX_FILE_BYTES} bytes", "is larger than any key file")
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise ConfigError("keys", "(hidden)", "is not UTF-8") from None


@dataclass(frozen=True, slots=True)
class KeyVariable:
    name: str
    environment: Mapping[str, str]

    def stamp(self) -> None:
        return None

    def read(self) -> str:
        if not (text := self.environment.get(self.name)):
            raise ConfigError(
                "tenants.keys_variable", self.name, "names an environment variable that is not set"
            )
        return text


def source_of(settings: TenantSettings, environment: Mapping[str, str] = os.environ) -> KeySource:
    """Where these settings keep their keys; they must have some."""
    if settings.keys_file is not None:
        return KeyFile(settings.keys_file)
    assert settings.keys_variable is not None
    return KeyVariable(settings.keys_variable, environment)


@dataclass(frozen=True, slots=True)
class _Reading:
    """What one look has found. Both None: nothing new."""

    table: KeyTable | None = None
    problem: str | None = None


class KeyRing:
    """`table` is what counts; it is replaced, never changed."""

    def __init__(self, source: KeySource) -> None:
        """Reads the keys. Raises ConfigError: a Router whose keys are unknown must not start."""
        self._source = source
        try:
            self._read_stamp = self._last_stamp = source.stamp()
            self.table = parse_keys(source.read())
        except OSError as error:
            raise ConfigError("tenants.keys_file", str(error.filename), f"{error.strerror}") from None
        self.num_reloads = 0
        self.num_failures = 0
        self.is_stale = False  # what the keys are now cannot be read: those of before go on working
        if not len(self.table):
            logger.warning("there are no API keys: nobody may use this service")

    async def watch(self) -> None:
        """Follows the source until cancelled; returns at once if it never changes."""
        while self._read_stamp is not None:
            await asyncio.sleep(LOOK_INTERVAL_S)
            self._take(await asyncio.to_thread(self._look))

    def look(self) -> None:
        """One look, here and now: `watch` without its thread."""
        self._take(self._look())

    def _look(self) -> _Reading:
        """Touches `_last_stamp` and `_read_stamp` alone; never two at a time."""
        try:
            stamp = self._source.stamp()
            is_settled = stamp == self._last_stamp
            self._last_stamp = stamp
            if stamp == self._read_stamp or not is_settled:
                return _Reading()
            self._read_stamp = stamp
            return _Reading(parse_keys(self._source.read()))
        except ConfigError as error:
            return _Reading(problem=str(error))
        except OSError as error:
            self._read_stamp = self._last_stamp = _NO_FILE  # whatever comes back is new
            return _Reading(problem=error.strerror or type(error).__name__)
        except Exception as error:  # or nobody would look again
            return _Reading(problem=type(error).__name__)

    def _take(self, reading: _Reading) -> None:
        if reading.table is not None:
            self.table = reading.table
            self.num_reloads += 1
            self.is_stale = False
            logger.info("API keys were read again", extra={"num_keys": len(self.table)})
        elif reading.problem is not None and not self.is_stale:
            self.is_stale = True
            self.num_failures += 1
            logger.error(
                "the API keys cannot be read; those of before go on working",
                extra={"detail": reading.problem},
            )


_NO_FILE = Stamp(0, 0, 0, 0)
