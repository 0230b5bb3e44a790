"""Greedy output is what transformers' own `generate` gives, token for token, whatever the engine does.

Each family's network is saved to disk and comes back through the loader the service uses.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import family_engines as engines
from tests import model_families as families
from tests.family_engines import SETTINGS, Runners, Setting
from tests.model_families import FAMILIES, MORE_FAMILIES, Family


@dataclass(frozen=True, slots=True)
class Saved:
    """A family's network on disk, with what it has to answer."""

    runners: Runners
    wanted: list[tuple[int, ...]]


def _params() -> list[Any]:
    usual = [pytest.param(family, id=family.name) for family in FAMILIES]
    return usual + [pytest.param(f, id=f.name, marks=pytest.mark.long) for f in MORE_FAMILIES]


@pytest.fixture(scope="module", params=_params())
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    family: Family = request.param
    folder = families.save(family, tmp_path_factory.mktemp(family.name))
    runners = Runners(folder, "cpu")
    yield Saved(runners, families.expected(folder, torch.device("cpu")))
    runners.close()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_greedy_output_is_generates(saved: Saved, setting: Setting) -> None:
    """Cold, warm, with late arrivals; shared prefixes, twins, one token, whole blocks."""
    engines.check_variety(saved.wanted)
    engines.check_family(saved.runners, setting, saved.wanted)


def test_merging_returns_what_was_computed_twice(saved: Saved) -> None:
    """The same answers on fewer blocks: twins ran side by side, and whole blocks were computed again."""
    kept, merged = (
        saved.runners.engine(Setting(discipline, block_size=4, cache_discipline=discipline))
        for discipline in ("append_only", "merge_on_fill")
    )
    for engine in (kept, merged):
        for _ in range(2):
            engines.check_answers(engines.answer_all(engine, families.prompts()), saved.wanted, "merged")
    assert merged.stats().cache.cached < kept.stats().cache.cached


def test_a_second_turn_reuses_the_first_answer(saved: Saved) -> None:
    engines.check_conversation(saved.runners, Setting("conversation", block_size=4))


def test_the_cases_need_neither_ray_nor_sockets() -> None:
    """A GPU machine may have torch and transformers and nothing else."""
    program = (
        "import sys\n"
        "for name in ('ray', 'zmq', 'fastapi', 'prometheus_client'): sys.modules[name] = None\n"
        "import tests.gpu.test_exactness_gpu, tests.gpu.test_triton_gpu"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
