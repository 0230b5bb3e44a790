"""What an installation compiles, and what is left where it cannot."""

from __future__ import annotations

import importlib
import shutil
import sys
from itertools import accumulate
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest

from tests.unit.test_native import pytestmark as needs_a_compiler

pytest.importorskip("setuptools", reason="setuptools is not installed: an installation brings its own")

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


class BuildHookInterface(Generic[T]):
    """Hatchling's, as far as the hook uses it: it is there while the project is being installed alone."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.warnings: list[str] = []
        self.app = SimpleNamespace(display_warning=self.warnings.append)


@pytest.fixture
def hatch_build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    interface = "hatchling.builders.hooks.plugin.interface"
    for name in accumulate(interface.split("."), lambda parent, child: f"{parent}.{child}"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[interface], "BuildHookInterface", BuildHookInterface, raising=False)
    monkeypatch.delitem(sys.modules, "hatch_build", raising=False)
    return importlib.import_module("hatch_build")


@pytest.fixture
def root(hatch_build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where we are: the sources alone, and modules that older ones were compiled to."""
    for source in hatch_build.MODULES.values():
        folder = tmp_path / Path(source).parent
        shutil.copytree(ROOT / Path(source).parent, folder, dirs_exist_ok=True)
        for compiled in folder.glob("*.so"):
            compiled.unlink()
        (tmp_path / source).with_suffix(".abi3.so").write_text("old")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def build(hatch_build: ModuleType, root: Path) -> tuple[dict[str, Any], list[str]]:
    """What the wheel is told, and the warnings."""
    hook, told = hatch_build.CompiledModules(root), {"artifacts": []}
    hook.initialize("standard", told)
    return told, hook.warnings


@needs_a_compiler
def test_every_module_is_compiled_beside_its_source(hatch_build: ModuleType, root: Path) -> None:
    told, warnings = build(hatch_build, root)
    compiled = [Path(source).with_suffix(".abi3.so") for source in hatch_build.MODULES.values()]
    assert told == {"artifacts": [f"/{path}" for path in compiled], "pure_python": False, "infer_tag": True}
    assert all((root / path).stat().st_size > 1000 for path in compiled)
    assert not warnings


def test_without_a_compiler_each_is_told_and_none_is_left(
    hatch_build: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    told, warnings = build(hatch_build, root)
    assert told == {"artifacts": []}  # a wheel for every platform
    assert sorted(warnings) == sorted(
        f"{source} is not compiled: Python takes its place" for source in hatch_build.MODULES.values()
    )
    assert not list(root.rglob("*.so"))
