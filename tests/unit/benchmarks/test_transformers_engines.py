"""The pure parts of rival engines; that they run is `tests/integration/test_bench_engine.py`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest

from benchmarks.transformers_engines import batching_options, longest_run


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


@dataclass
class PagesCalledBlocks:
    """`ContinuousBatchingConfig` of transformers 5.17, as far as it is used."""

    block_size: int = 256
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    use_cuda_graph: bool | None = None


@dataclass
class PagesCalledPages:
    """That of transformers 5.23, where `block_size` is still known, and warned of."""

    page_size: int = 256
    num_blocks: int | None = None
    max_batch_tokens: int | None = None
    use_cuda_graph: bool | None = None
    auto_switch_to_flash: bool = True
    block_size: int | None = None


@pytest.mark.parametrize(
    ("kind", "page", "differs"),
    [(PagesCalledBlocks, "block_size", {}), (PagesCalledPages, "page_size", {"auto_switch_to_flash": False})],
)
def test_continuous_batching_is_given_our_sizes_by_the_names_it_has(
    kind: Any, page: str, differs: dict[str, Any]
) -> None:
    names = {field.name for field in fields(kind)}
    config = kind(**batching_options(names, num_tokens=1000, step_tokens=64))
    assert (getattr(config, page), config.num_blocks, config.max_batch_tokens) == (256, 4, 64)
    assert config.use_cuda_graph is False, "a replayed forward passes by the hook that reads the clock"
    assert {name: getattr(config, name) for name in differs} == differs
