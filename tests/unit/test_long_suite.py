"""The long suite imports files by their text: none that has long tests may be left out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_ignore_collect

TESTS = Path(__file__).parents[1]
MARK = "mark." + "long"


def is_left_out(path: Path, expression: str) -> bool:
    config = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
    return bool(pytest_ignore_collect(path, config))  # type: ignore[arg-type]


@pytest.mark.parametrize("expression", ["long", "long and not gpu"])
def test_files_without_long_tests_are_left_out_of_the_long_suite(tmp_path: Path, expression: str) -> None:
    (with_long := tmp_path / "test_a.py").write_text(f"pytestmark = [pytest.{MARK}]")
    (without := tmp_path / "test_b.py").write_text("def test_b() -> None: ...")
    assert is_left_out(without, expression)
    assert not is_left_out(with_long, expression)
    assert not is_left_out(tmp_path, expression)


@pytest.mark.parametrize("expression", ["", "not long and not gpu", "gpu", "long or gpu"])
def test_no_other_suite_leaves_files_out(tmp_path: Path, expression: str) -> None:
    (without := tmp_path / "test_b.py").write_text("def test_b() -> None: ...")
    assert not is_left_out(without, expression)


def test_only_test_files_give_the_mark() -> None:
    """A mark that a file has from elsewhere would not be in its text."""
    others = [path for path in TESTS.rglob("*.py") if not path.match("test_*.py")]
    assert len(others) > 50
    marking = [path for path in others if MARK in path.read_text()]
    assert marking == [TESTS / "conftest.py"]  # which looks for it
