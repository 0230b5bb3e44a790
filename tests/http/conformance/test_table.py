"""The table of conformance is complete: each row has a test in this folder."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

from tests.conformance.rows import ROWS


def test_every_row_has_a_test() -> None:
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    modules = [importlib.import_module(f"tests.http.conformance.{file.stem}") for file in files]
    tests = [test for module in modules for name, test in vars(module).items() if name.startswith("test_")]
    assert all(inspect.isfunction(test) for test in tests)
    held = {item for test in tests for item in getattr(test, "conformance_rows", ())}
    assert set(ROWS) == held
