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
    """A family's network as the service loads it, with what it has to answer."""

    runners: Runners
    wanted: list[tuple[int, ...]]


class Shelf:
    """Each family's network, saved and asked when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._saved: dict[str, Saved] = {}

    def get(self, family: Family) -> Saved:
        if family.name not in self._saved:
            folder = families.save(family, self._folder / family.name)
            wanted = families.expected(folder, torch.device("cpu"))
            self._saved[family.name] = Saved(Runners(folder, "cpu"), wanted)
        return self._saved[family.name]

    def close(self) -> None:
        for saved in self._saved.values():
            saved.runners.close()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    shelf = Shelf(tmp_path_factory.mktemp("families"))
    yield shelf
    shelf.close()


# Every family meets whole prompts, and chunks over small blocks, which the screened setting has. Two more,
# whose windows and latent pages could be computed again otherwise, meet blocks that are taken away, and the
# latter pages that are copied. The other settings differ in what scheduler and pool do, which no family
# changes: one meets them all. In the broad suite all of `FAMILIES` meet the same chunks without the screen,
# and blocks that are taken away, and these three every setting; the rest take turns, so that each meets two
# and each is met by two or three. `MORE_FAMILIES` meet chunks over small blocks only where blocks are taken
# away, too.
ASKS_MUCH = ("cache-on", "chunked-blocks-of-4", "preempted-blocks-of-4", "screened")
ASKS_MOST = ("cache-on", "preempted-blocks-of-4", "screened")
IN_EVERY_SETTING = ("llama", "gemma3", "deepseek_v3")
USUAL = ("cache-on", "screened")
MORE = {
    "gemma3": ("preempted-blocks-of-4",),
    "deepseek_v3": ("preempted-blocks-of-4", "swapped"),
}
OTHERS = tuple(setting.name for setting in SETTINGS if setting.name not in ASKS_MUCH)


def _meets(family: Family, setting: Setting) -> bool:
    if family in MORE_FAMILIES:
        return setting.name in ASKS_MOST
    if setting.name in ASKS_MUCH or family.name in IN_EVERY_SETTING:
        return True
    return (OTHERS.index(setting.name) - 2 * FAMILIES.index(family)) % len(OTHERS) < 2


def _is_broad(family: Family, setting: Setting) -> bool:
    if family in MORE_FAMILIES:
        return True
    return family.name != "llama" and setting.name not in (*USUAL, *MORE.get(family.name, ()))


def _param(family: Family, *others: Any, name: str, is_broad: bool) -> Any:
    return pytest.param(
        family, *others, id=name, marks=(pytest.mark.long, pytest.mark.broad) if is_broad else ()
    )


IN_SETTINGS = [
    _param(family, setting, name=f"{family.name}-{setting.name}", is_broad=_is_broad(family, setting))
    for family in (*FAMILIES, *MORE_FAMILIES)
    for setting in SETTINGS
    if _meets(family, setting)
]
ONCE = [
    _param(family, name=family.name, is_broad=family.name not in ("llama", "deepseek_v3"))
    for family in (*FAMILIES, *MORE_FAMILIES)
]


@pytest.mark.parametrize(("family", "setting"), IN_SETTINGS)
def test_greedy_output_is_generates(shelf: Shelf, family: Family, setting: Setting) -> None:
    """Cold, warm, with late arrivals; shared prefixes, twins, one token, whole blocks."""
    saved = shelf.get(family)
    engines.check_variety(saved.wanted)
    engines.check_family(saved.runners, setting, saved.wanted)


@pytest.mark.parametrize("family", ONCE)
def test_merging_returns_what_was_computed_twice(shelf: Shelf, family: Family) -> None:
    """The same answers on fewer blocks: twins ran side by side, and whole blocks were computed again."""
    saved = shelf.get(family)
    kept, merged = (
        saved.runners.engine(Setting(discipline, block_size=4, cache_discipline=discipline))
        for discipline in ("append_only", "merge_on_fill")
    )
    for engine in (kept, merged):
        for _ in range(2):
            engines.check_answers(engines.answer_all(engine, families.prompts()), saved.wanted, "merged")
    assert merged.stats().cache.cached < kept.stats().cache.cached


@pytest.mark.parametrize("family", ONCE)
def test_a_second_turn_reuses_the_first_answer(shelf: Shelf, family: Family) -> None:
    engines.check_conversation(shelf.get(family).runners, Setting("conversation", block_size=4))


def test_the_cases_need_neither_ray_nor_sockets() -> None:
    """A GPU machine may have torch and transformers and nothing else."""
    program = (
        "import sys\n"
        "for name in ('ray', 'zmq', 'fastapi', 'prometheus_client'): sys.modules[name] = None\n"
        "import tests.gpu.test_exactness_gpu, tests.gpu.test_triton_gpu"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
