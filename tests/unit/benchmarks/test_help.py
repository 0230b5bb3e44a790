"""What `--help` of a benchmark shows: how it is called, and its description line by line as it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from benchmarks import step_profile, tokenization
from benchmarks.schedule import __main__ as schedule

Main = Callable[[Sequence[str]], int]


@pytest.mark.parametrize(
    ("main", "name"),
    [
        (schedule.main, "benchmarks.schedule"),
        (step_profile.main, "benchmarks.step_profile"),
        (tokenization.main, "benchmarks.tokenization"),
    ],
    ids=["schedule", "step_profile", "tokenization"],
)
def test_help_has_examples(main: Main, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    examples = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    assert [line for line in examples if line.startswith(f"  python -m {name}")]


def test_the_tokenizers_help_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """All of it was one paragraph, its command among the sentences."""
    assert tokenization.__doc__ is not None
    with pytest.raises(SystemExit, match="0"):
        tokenization.main(["--help"])
    assert tokenization.__doc__ in capsys.readouterr().out
