"""What `make` says before there is anything to run it with, and what it leaves out on the oldest versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
# Of torch, and of what computes with it.
COMPUTES = re.compile(
    r"^(import torch|from torch|from replica\.(attention|layers|models|runners\.model_runner))\b",
    re.MULTILINE,
)

# An interpreter that serves, and says what it is called.
MAKES = 'case "$1" in --version) echo "${0##*/}";; -m) echo "made $3" > made;; esac'


def make_environment(
    folder: Path, pythons: dict[str, str], *settings: str
) -> subprocess.CompletedProcess[str]:
    """`make .venv/bin/python` in a copy of what it reads, with these interpreters and no others."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(PROJECT / name, folder)
    (commands := folder / "bin").mkdir()
    for tool in ("make", "sh"):
        found = shutil.which(tool)
        assert found, f"{tool} is not installed"
        (commands / tool).symlink_to(found)
    for name, script in pythons.items():
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    return subprocess.run(
        ["make", ".venv/bin/python", *settings],
        cwd=folder,
        env={
            **{key: os.environ[key] for key in ("LANG", "LC_ALL") if key in os.environ},
            "PATH": str(commands),
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("stamp", [".venv/serve.installed", ".venv/dev.installed"])
@pytest.mark.parametrize(("setting", "is_compiled"), [("PIP_COMPILE=", True), ("PIP_COMPILE=0", False)])
def test_what_is_installed_is_compiled_on_all_cores_unless_pip_is_told_not_to(
    stamp: str, setting: str, is_compiled: bool
) -> None:
    said = subprocess.run(
        ["make", "--dry-run", "--always-make", stamp, setting],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "pip install --disable-pip-version-check --no-compile" in said
    assert ("compileall -qq -j 0 .venv/lib" in said) is is_compiled


def test_an_older_python_is_named_beside_what_is_needed(tmp_path: Path) -> None:
    old = 'case "$1" in --version) echo "Python 3.9.2";; *) exit 1;; esac'
    made = make_environment(tmp_path, {"python3": old})
    assert made.returncode != 0
    assert "Warmpath needs Python 3.11, 3.12 or 3.13 with venv" in made.stderr
    assert "Found: Python 3.9.2." in made.stderr
    assert not (tmp_path / ".venv").exists()


def test_no_python_at_all_is_said(tmp_path: Path) -> None:
    made = make_environment(tmp_path, {})
    assert made.returncode != 0
    assert "Found: no python3." in made.stderr


def test_the_first_interpreter_that_serves_is_taken(tmp_path: Path) -> None:
    made = make_environment(tmp_path, {"python3": "exit 1", "python3.12": MAKES})
    assert made.returncode == 0, made.stderr
    assert "Creating .venv with python3.12\n" in made.stdout
    assert (tmp_path / "made").read_text() == "made .venv\n"


def test_an_interpreter_can_be_named(tmp_path: Path) -> None:
    made = make_environment(tmp_path, {"python3": MAKES, "python3.11": MAKES}, "PYTHON=python3.11")
    assert made.returncode == 0, made.stderr
    assert "Creating .venv with python3.11" in made.stdout


def test_no_other_than_the_named_interpreter_is_taken(tmp_path: Path) -> None:
    made = make_environment(tmp_path, {"python3": MAKES}, "PYTHON=python3.14")
    assert made.returncode != 0
    assert "Found: no python3.14." in made.stderr


def test_the_oldest_versions_get_every_test_that_computes() -> None:
    """Folders of unit tests are named whole; of the others, one by one."""
    made = subprocess.run(
        ["make", "--dry-run", "test-lowest"], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    files = [
        path for folder in ("integration", "property") for path in (PROJECT / "tests" / folder).glob("*.py")
    ]
    computing = {str(path.relative_to(PROJECT)) for path in files if COMPUTES.search(path.read_text())}
    assert "tests/property/test_triton_rows.py" in computing
    assert computing - set(made.stdout.split()) == set()
