"""`python -m tests.gpu [PART ...]`: every check that needs a card, or some; other arguments are pytest's.

For machines with a card and little else: torch, transformers, xxhash, msgspec, pytest and hypothesis will do.
Without a card everything is skipped, with the reason, and the status is 5: nothing was checked. Where the
card is lost to the process, as by an illegal access in a kernel, it ends, since all that follows would fail:
name the parts that are left, or leave that test out (--deselect).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from replica.runners.lost_card import is_lost

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
NOTHING_RAN = 5

# What decides most in the least time comes first.
FILE_BY_PART = {
    "kernels": "test_triton_gpu.py",
    "layers": "test_layers_gpu.py",
    "graphs": "test_decode_graphs_gpu.py",
    "engine": "test_engine_gpu.py",
    "flash": "test_flash_gpu.py",
    "ranks": "test_ranks_gpu.py",
    "exactness": "test_exactness_gpu.py",  # many families in many settings: minutes
}


class _Counter:
    """A pytest plugin: how many tests were really run."""

    num_run = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_run += report.when == "call" and not report.skipped


class LostCard:
    """A pytest plugin: ends the run where nothing more can be found out in this process."""

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        has_failed = call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception)
        if has_failed and torch.cuda.is_available() and is_lost(torch.device("cuda", 0)):
            item.session.shouldfail = "the card is lost to this process"


def main(arguments: list[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(f"{__doc__}\nparts: {', '.join(FILE_BY_PART)}\n")
        return 0
    counter = _Counter()
    os.environ.setdefault("TRITON_INTERPRET", "0")  # `tests/conftest.py` would have kernels interpreted
    settings = ["-c", str(FOLDER / "pytest.ini"), "--rootdir", str(ROOT), "--confcutdir", str(ROOT)]
    status = int(pytest.main([*settings, *chosen(arguments)], plugins=[counter, LostCard()]))
    return NOTHING_RAN if status == 0 and counter.num_run == 0 else status


def chosen(arguments: list[str]) -> list[str]:
    """The files of the parts that are named first, all if none is, in order; then the other arguments."""
    count = next((at for at, each in enumerate(arguments) if each not in FILE_BY_PART), len(arguments))
    parts = arguments[:count] or FILE_BY_PART
    return [*(str(FOLDER / file) for part, file in FILE_BY_PART.items() if part in parts), *arguments[count:]]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
