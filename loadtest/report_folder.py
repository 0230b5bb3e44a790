"""The folder that a long run ends in: whether it can be written to, found out before; and how it is written.

Knows files alone.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from loadtest.placement.errors import BadRequest, NotWritten

_ROOM_BYTES = 1 << 20  # about what a report takes: a file without content fits on a full disk


def check_folder(folder: Path, option: str = "--out") -> None:
    """Before anything runs: files can be written there. Leaves nothing behind. Raises BadRequest.

    option: which one named it.
    """
    made: list[Path] = []
    try:
        made += [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM_BYTES))
    except OSError as error:
        raise BadRequest(f"{option}: nothing can be written to {folder}: {error.strerror}") from None
    finally:
        for each in made:
            with contextlib.suppress(OSError):
                each.rmdir()


def remove_earlier(folder: Path, *patterns: str) -> None:
    """Files of an earlier run, which would pass for this one's, whatever becomes of these. Raises OSError."""
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def reporting(folder: Path) -> Iterator[None]:
    """For what writes into it, when all has been printed that a disk without room must not cost.

    Raises NotWritten.
    """
    try:
        yield
    except OSError as error:
        raise NotWritten(folder, error.strerror or str(error)) from None


def write_whole(path: Path, content: bytes) -> None:
    """A reader finds what was there before or all of this, never a part. Makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
