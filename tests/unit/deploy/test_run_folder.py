"""The folder of a run is there as long as the run, and no longer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

import pytest

from deploy import run_folder
from deploy.run_folder import made_below


def is_locked(folder: Path) -> bool:
    """As systemd-tmpfiles looks before it takes what is old in a folder."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)  # it may ask for the other kind, too
    except BlockingIOError:
        return True
    finally:
        os.close(opened)
    return False


def test_cleaners_leave_it_alone_while_it_is_used(tmp_path: Path) -> None:
    with made_below(str(tmp_path)) as folder:
        assert folder.parent == tmp_path
        assert folder.stat().st_mode & 0o777 == 0o700
        assert is_locked(folder)
        assert not is_locked(tmp_path)
    assert not folder.exists()


def test_it_is_there_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder.fcntl, "flock", none)
    with made_below(str(tmp_path)) as folder:
        assert folder.is_dir()


def test_what_is_in_it_goes_with_it_also_after_an_error(tmp_path: Path) -> None:
    with contextlib.suppress(ValueError), made_below(str(tmp_path)) as folder:
        (folder / "haproxy").touch()
        raise ValueError("ended")
    assert not list(tmp_path.iterdir())
