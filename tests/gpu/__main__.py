"""`python -m tests.gpu`: every check that needs a card, in one command; arguments are pytest's.

For machines with a card and little else: torch, transformers, xxhash, msgspec, pytest and hypothesis will do.
Without a card everything is skipped, with the reason, and the status is 5: nothing was checked.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
NOTHING_RAN = 5


class _Counter:
    """A pytest plugin: how many tests were really run."""

    num_run = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_run += report.when == "call" and not report.skipped


def main(arguments: list[str]) -> int:
    counter = _Counter()
    settings = ["-c", str(FOLDER / "pytest.ini"), "--rootdir", str(ROOT), "--confcutdir", str(ROOT)]
    status = int(pytest.main([*settings, str(FOLDER), *arguments], plugins=[counter]))
    return NOTHING_RAN if status == 0 and counter.num_run == 0 else status


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
