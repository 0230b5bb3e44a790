"""The files of one recording: made, rotated, locked while they are written, and the oldest dropped for room.

Knows folders and lines; knows neither requests nor what a line says. One thread.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from cache.errors import ConfigError
from router.config import RecordConfig

FILE_PATTERN = "traffic-*.jsonl"  # of all recorders

logger = logging.getLogger(__name__)


class TraceFiles:
    """The files of one recording: opened, rotated, and the folder kept within its limit. One thread."""

    def __init__(self, config: RecordConfig, header: dict[str, Any], stem: str) -> None:
        """header: what every file opens with, but for its part number. stem: what their names begin with, so
        that `FILE_PATTERN` finds them."""
        self._folder = Path(config.folder)
        self._max_file_bytes = config.max_file_bytes
        self._max_total_bytes = config.max_total_bytes
        self._header = header
        self._stem = stem
        self._part = 0
        self._file: IO[bytes] | None = None
        self._num_bytes = 0
        self._num_lines = 0  # without the header
        self._kept_bytes = 0  # of them on the disk, whole lines; 0: not one but the header
        self.num_lost = 0  # lines of files that were deleted before their end

    @property
    def path(self) -> Path:
        """Of the file written last."""
        return self._folder / f"{self._stem}-{self._part:04d}.jsonl"

    def prepare(self) -> None:
        """Make the folder and try to write there. Raises ConfigError."""
        try:
            self._make_folder()
            probe = self._folder / f".{self._stem}.probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            accepted = f"must be a folder that can be written to ({error.strerror})"
            raise ConfigError("record.folder", str(self._folder), accepted) from None

    def write(self, line: bytes) -> None:
        """Append a line, in a new file if this one would grow too long, or is gone. Raises OSError."""
        self._notice_deleted()
        if self._file is not None and self._num_lines and self._num_bytes + len(line) > self._max_file_bytes:
            self.close()
        if self._file is None:
            self._open()
        self._append(line)
        self._num_lines += 1

    def flush(self) -> None:
        """Raises OSError."""
        if self._file is not None:
            self._file.flush()
            self._kept_bytes = self._num_bytes if self._num_lines else 0

    def close(self) -> None:
        """End the file. Raises OSError if what was buffered cannot be written. Idempotent."""
        self.flush()
        self._notice_deleted()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def abandon(self) -> None:
        """End the file after an error: what was flushed stays, a file without a line goes.

        A full disk takes a part of what it is given, and no reader goes on behind half a line.
        """
        file, self._file = self._file, None
        if file is None:
            return
        with suppress(OSError):
            file.close()
        with suppress(OSError):
            if self._kept_bytes:
                os.truncate(self.path, self._kept_bytes)
            else:
                self.path.unlink()

    def _make_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _open(self) -> None:
        self._make_folder()  # somebody may have tidied it up, too
        self._make_room()
        self._part += 1
        # Not for other users of the machine: lengths and times are about somebody, too.
        self._file = open(self.path, "xb", opener=lambda path, flags: os.open(path, flags, 0o600))
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)  # until it is closed, or this process ends
        except OSError as error:  # another Router may delete it, which is noticed then
            logger.warning("a recording cannot be locked", extra={"error": str(error)})
        self._num_bytes = self._num_lines = self._kept_bytes = 0
        self._append(as_line({**self._header, "part": self._part}))

    def _append(self, line: bytes) -> None:
        assert self._file is not None
        self._file.write(line)
        self._num_bytes += len(line)

    def _notice_deleted(self) -> None:
        """Where somebody has deleted the file, its lines are lost; the next line begins another one."""
        file = self._file
        if file is None or os.fstat(file.fileno()).st_nlink:
            return
        logger.warning("a recording was deleted while it was written", extra={"num_rows": self._num_lines})
        self.num_lost += self._num_lines
        self._file = None
        file.close()

    def _make_room(self) -> None:
        """Drop the oldest traces of the folder, other Routers' included, until one more file fits.

        Those that are being written stay, and count with all they may grow to: so many Routers that this is
        more than the limit take more than the limit.
        """
        total = self._max_file_bytes
        ended = []
        for path in self._folder.glob(FILE_PATTERN):
            with suppress(FileNotFoundError):  # another Router makes room as well
                status = path.stat()
                if _is_being_written(path):
                    total += max(status.st_size, self._max_file_bytes)
                else:
                    total += status.st_size
                    ended.append((status.st_mtime_ns, path.name, status.st_size))
        for _, name, size in sorted(ended):
            if total <= self._max_total_bytes:
                return
            (self._folder / name).unlink(missing_ok=True)
            total -= size
        if total > self._max_total_bytes:
            logger.warning("recordings take more than max_total_bytes", extra={"num_bytes": total})


def _is_being_written(path: Path) -> bool:
    """Whether a process that lives has it locked. One that cannot be looked at is not."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: whoever looks is no writer
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def as_line(fields: dict[str, Any]) -> bytes:
    """JSON in UTF-8, with its line end."""
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
