"""Compiles what is written in C, where there is a compiler; without one the same is done in Python.

Hatchling calls it for every wheel and editable installation, and `pip install -v` shows what the compiler
said. The module goes beside its source, for the stable ABI: one for every Python from 3.11 on.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

MODULE, SOURCE = "cache.native.chains", "cache/native/chains.c"


class CompiledModules(BuildHookInterface[Any]):
    """Of the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compiled = compile_in_place(Path(self.root))
        if compiled is None:
            self.app.display_warning(f"{SOURCE} is not compiled: Python takes its place")
            return
        build_data["artifacts"].append(f"/{compiled}")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def compile_in_place(root: Path) -> Path | None:
    """Where the module is, from the root; None if there is no compiler that makes it."""
    extension = Extension(MODULE, [SOURCE], py_limited_api=True, optional=True)
    command = build_ext(Distribution({"ext_modules": [extension], "src_root": str(root)}))
    with TemporaryDirectory() as scratch:
        command.inplace, command.build_temp, command.build_lib = True, scratch, scratch
        command.ensure_finalized()
        compiled = Path(command.get_ext_filename(MODULE))
        (root / compiled).unlink(missing_ok=True)  # what an older source was compiled to
        command.run()
    return compiled if (root / compiled).exists() else None
