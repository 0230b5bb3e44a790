"""`python -m tests.gpu` where there is no card: all is collected and skipped, and that is no success."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu import __main__ as command
from tests.gpu.__main__ import FILE_BY_PART, FOLDER, LostCard, chosen

ROOT = Path(__file__).parents[2]


def files(arguments: list[str]) -> list[str]:
    return [each.removeprefix(f"{FOLDER}/") for each in chosen(arguments)]


def test_every_file_is_a_part() -> None:
    assert sorted(FILE_BY_PART.values()) == sorted(path.name for path in FOLDER.glob("test_*.py"))


def test_parts_may_be_named_and_the_rest_is_pytests() -> None:
    assert files([])[0] == "test_triton_gpu.py"
    assert files([])[-1] == "test_exactness_gpu.py"
    assert files(["-k", "kernels"]) == [*FILE_BY_PART.values(), "-k", "kernels"]
    assert files(["graphs", "kernels", "-x"]) == ["test_triton_gpu.py", "test_decode_graphs_gpu.py", "-x"]


def passes() -> None:
    """A test."""


def fails() -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def skips() -> None:
    pytest.skip("needs two cards")


@pytest.mark.parametrize(
    ("test", "is_lost", "ends"),
    [(fails, True, True), (fails, False, False), (passes, True, False), (skips, True, False)],
)
def test_it_ends_where_a_test_has_lost_the_card(
    test: Callable[[], None], is_lost: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "is_lost", lambda device: is_lost)
    item: Any = SimpleNamespace(session=SimpleNamespace(shouldfail=False))
    LostCard().pytest_runtest_makereport(item, pytest.CallInfo.from_call(test, when="call"))
    assert bool(item.session.shouldfail) == ends


def test_without_a_card_the_status_says_that_nothing_was_checked() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    command = [sys.executable, "-m", "tests.gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 5, done.stdout + done.stderr
    assert "torch sees no CUDA device here" in done.stdout
    assert "needs two CUDA devices; torch sees 0" in done.stdout
    *_, summary = done.stdout.strip().splitlines()
    assert " skipped" in summary
    assert "passed" not in summary
    assert "failed" not in summary
