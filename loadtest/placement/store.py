"""Finished cells on disk, each under a name that changes with anything its result depends on.

A result is written beside its place and moved there, so a file that exists is whole unless somebody else has
damaged it. Knows files; runs nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import BinaryIO

import numpy as np

from loadtest.placement.code_version import code_version
from loadtest.placement.errors import NotKept, UnreadableResult
from loadtest.simulation.cell import CellResult, CellSpec

_ARRAYS = tuple(field.name for field in fields(CellResult) if field.type in ("Floats", "Ints"))
_NUMBERS = tuple(field.name for field in fields(CellResult) if field.name not in _ARRAYS)


class ResultStore:
    """Results by spec, of this version of the code. Any number of processes may read and write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def folder(self) -> Path:
        return self._folder

    def path(self, spec: CellSpec) -> Path:
        """Where the result is or would be."""
        parts = (spec.digest(), code_version(spec.policy))
        return self._folder / f"{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:32]}.npz"

    def load(self, spec: CellSpec) -> CellResult | None:
        """The finished cell; None if there is none. Raises UnreadableResult for a file that is not whole."""
        path = self.path(spec)
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                numbers = json.loads(str(stored["numbers"]))
                return CellResult(**{name: stored[name] for name in _ARRAYS}, **numbers)
        except FileNotFoundError:
            return None
        except Exception as error:  # of numpy, zipfile, zlib, json: whichever a damaged file gets to
            raise UnreadableResult(path, str(error) or type(error).__name__) from error

    def save(self, spec: CellSpec, result: CellResult) -> None:
        """Keep it, instead of what there may be. Raises NotKept, and leaves nothing behind then."""
        path = self.path(spec)
        # Not by process id: two containers that share the folder have the same.
        partial = path.with_suffix(f".{uuid.uuid4().hex}.part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                _write(file, result)
            partial.replace(path)
        except OSError as error:
            raise NotKept(path, error.strerror or str(error)) from error
        finally:
            with suppress(OSError):  # gone already, unless something has come between, Ctrl-C for one
                partial.unlink()


def _write(file: BinaryIO, result: CellResult) -> None:
    """On the disk when it returns: else a name could outlive a crash that its content does not."""
    np.savez_compressed(
        file,
        numbers=np.array(json.dumps({name: getattr(result, name) for name in _NUMBERS})),
        **{name: getattr(result, name) for name in _ARRAYS},
    )
    file.flush()
    os.fsync(file.fileno())
