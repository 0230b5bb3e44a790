"""The folder of one run: what Serve's proxy is started with, its sockets and its configuration."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def made_below(parent: str) -> Iterator[Path]:
    """A new folder, ours alone, which is removed at the end.

    What starts the proxy is written once, and cleaners of /tmp go by age: without it no proxy that dies is
    replaced. systemd-tmpfiles leaves a folder alone that somebody has a lock on.
    """
    with tempfile.TemporaryDirectory(prefix="warmpath-", dir=parent, ignore_cleanup_errors=True) as folder:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):  # a file system that knows no locks
                fcntl.flock(opened, fcntl.LOCK_EX)
            yield Path(folder)
        finally:
            os.close(opened)
