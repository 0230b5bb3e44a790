"""Compiles what is written in C, where there is a compiler; without one the same is done in Python.

Hatchling calls it for every wheel and editable installation, and `pip install -v` shows what the compiler
said. Each module goes beside its source, for the stable ABI: one for every Python from 3.11 on.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

MODULES = {
    "cache.native.chains": "cache/native/chains.c",
    "router.native.costs": "router/native/costs.c",
    "router.native.depths": "router/native/depths.c",
    "router.native.passing": "router/native/passing.c",
    "router.native.uses": "router/native/uses.c",
    "router.native.changes": "router/native/changes.c",
}
# Sums are Python's to the last bit, also where a processor could multiply and add in one step.
EXACT = ["-ffp-contract=off"]


class CompiledModules(BuildHookInterface[Any]):
    """Of the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compiled = compile_in_place(Path(self.root))
        for module in MODULES.keys() - compiled.keys():
            self.app.display_warning(f"{MODULES[module]} is not compiled: Python takes its place")
        if compiled:
            build_data["artifacts"] += [f"/{path}" for path in compiled.values()]
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


def compile_in_place(root: Path) -> dict[str, Path]:
    """Where each module is, from the root; those that no compiler made are left out."""
    extensions = [
        Extension(module, [source], py_limited_api=True, optional=True, extra_compile_args=EXACT)
        for module, source in MODULES.items()
    ]
    command = build_ext(Distribution({"ext_modules": extensions, "src_root": str(root)}))
    with TemporaryDirectory() as scratch:
        command.inplace, command.build_temp, command.build_lib = True, scratch, scratch
        command.ensure_finalized()
        compiled = {module: Path(command.get_ext_filename(module)) for module in MODULES}
        for path in compiled.values():
            (root / path).unlink(missing_ok=True)  # what an older source was compiled to
        command.run()
    return {module: path for module, path in compiled.items() if (root / path).exists()}
