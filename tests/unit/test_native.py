"""What is compiled: there where it can be, without a warning, and within its bounds."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from cache import block_hash
from router.index import segments
from router.openai_api.about import DECIDING

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("cc") or shutil.which("gcc")
HASHES = ROOT / "cache" / "native"
SOURCES = [HASHES / "chains.c", *(ROOT / "router" / "native").glob("*.c")]
CHECK = Path(__file__).parent / "native_check.c"
SANITIZED = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

HEADERS = Path(sysconfig.get_path("include"))

pytestmark = pytest.mark.skipif(
    COMPILER is None or not (HEADERS / "Python.h").exists(),
    reason="no C compiler, or no headers of Python's: Python does the same",
)


def compiler_says(*arguments: str | Path) -> str:
    """Its errors; "" if it has none."""
    assert COMPILER is not None
    command = [COMPILER, "-O2", "-Wall", "-Wextra", "-Werror", f"-I{HASHES}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize("module", [block_hash, segments, *DECIDING], ids=lambda module: module.__name__)
def test_an_installation_beside_a_compiler_has_it(module: ModuleType) -> None:
    assert module.IS_COMPILED, "not compiled here: pip install -e . does, and its -v says why it could not"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_a_module_compiles_without_a_warning(source: Path) -> None:
    assert compiler_says("-fsyntax-only", f"-I{HEADERS}", source) == ""


def test_no_message_is_left_and_both_compressions_agree(tmp_path: Path) -> None:
    nothing, program = tmp_path / "nothing.c", tmp_path / "check"
    nothing.write_text("int main(void) { return 0; }\n")
    if why := compiler_says(*SANITIZED, nothing, "-o", program):
        pytest.skip(f"the compiler has no sanitizers here: {why}")
    assert compiler_says(*SANITIZED, CHECK, "-o", program) == ""
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
