"""What kernels would take of a card, from a process in which Triton compiles: in a test's it interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def compiled(cache: Path, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each case what `tests.triton_compiler` says. cache: a folder of nobody else's."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, "-m", "tests.triton_compiler", json.dumps(cases)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
    )
    answers: list[dict[str, Any]] = json.loads(finished.stdout)
    return answers
