"""The pure parts of the contenders; that they run is `tests/integration/test_bench_engine.py`."""

from __future__ import annotations

import pytest

from benchmarks.contenders import longest_run


@pytest.mark.parametrize(
    ("tokens", "batch", "expected"),
    [
        ([128, 1, 1, 1], 1, [1, 2, 3]),
        # A chunk of 8 prompt tokens looks like a step of 8 decodes; the long run is the steady state.
        ([512, 8, 400, 8, 8, 8, 8, 4, 4], 8, [3, 4, 5, 6]),
        ([512, 508, 4, 4], 8, []),
        ([], 8, []),
        ([8, 8], 8, [0, 1]),
    ],
)
def test_the_steady_state_is_the_longest_run_of_full_batches(
    tokens: list[int], batch: int, expected: list[int]
) -> None:
    steady = longest_run(tokens, batch)
    assert list(range(steady.start, steady.stop)) == expected
