"""Whether a folder for the end of a long run can be written to, found out before it. Knows files alone."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from loadtest.placement.errors import BadRequest


def check_folder(folder: Path, option: str = "--out") -> None:
    """Before anything runs: files can be written there. Leaves nothing behind. Raises BadRequest.

    option: which one named it.
    """
    made: list[Path] = []
    try:
        made += [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadRequest(f"{option}: nothing can be written to {folder}: {error.strerror}") from None
    finally:
        for each in made:
            with contextlib.suppress(OSError):
                each.rmdir()
