"""Finished cells on disk, each under a name that changes with anything its result depends on.

A result is written beside its place and moved there, so a file that exists is whole. Knows files; runs
nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import fields
from pathlib import Path

import numpy as np

from loadtest.placement.code_version import code_version
from loadtest.simulation.cell import CellResult, CellSpec

_ARRAYS = tuple(field.name for field in fields(CellResult) if field.type in ("Floats", "Ints"))
_NUMBERS = tuple(field.name for field in fields(CellResult) if field.name not in _ARRAYS)


class ResultStore:
    """Results by spec, of this version of the code. One process writes; any may read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._contents: dict[str, str] = {}  # digest of each workload's file, read once

    @property
    def folder(self) -> Path:
        return self._folder

    def path(self, spec: CellSpec) -> Path:
        """Where the result is or would be."""
        source = spec.workload.source
        if source not in self._contents:
            self._contents[source] = spec.workload.content_digest()
        parts = (spec.digest(), self._contents[source], code_version(spec.policy))
        return self._folder / f"{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:32]}.npz"

    def load(self, spec: CellSpec) -> CellResult | None:
        """The finished cell; None if there is none."""
        path = self.path(spec)
        if not path.exists():
            return None
        with np.load(path, allow_pickle=False) as stored:
            numbers = json.loads(str(stored["numbers"]))
            return CellResult(**{name: stored[name] for name in _ARRAYS}, **numbers)

    def save(self, spec: CellSpec, result: CellResult) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self.path(spec)
        partial = path.with_suffix(f".{os.getpid()}.part")
        with partial.open("wb") as file:
            np.savez_compressed(
                file,
                numbers=np.array(json.dumps({name: getattr(result, name) for name in _NUMBERS})),
                **{name: getattr(result, name) for name in _ARRAYS},
            )
        partial.replace(path)
