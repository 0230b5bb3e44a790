"""Real networks whose prompts go through the layers span by span: the tokens that they give at one go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from cache.events import StepTimeModel
from replica.runners.model_runner import ModelRunner
from replica.scheduling.runner import LaunchedStep, ScheduledSequence
from tests import family_engines as engines
from tests import model_families as families
from tests.fakes.engine import known_pace
from tests.family_engines import Runners, Setting
from tests.model_families import FAMILIES, MORE_FAMILIES, Family

LEAST = 0.001  # seconds that decodes may be stalled: always over by this model, however quick the machine is
SLOW = StepTimeModel(base_s=0.1, per_token_s=0.01, per_attention_s=1e-5, per_sequence_s=0.0)
SETTINGS = (
    Setting("blocks-of-4", block_size=4, itl_target_s=LEAST),
    Setting("blocks-of-16", itl_target_s=LEAST),
    Setting("preempted", num_blocks=8, itl_target_s=LEAST),
    Setting("swapped", num_blocks=9, host_cache_gib=0.01, preemption="swap", itl_target_s=LEAST),
    Setting("screened", block_size=4, greedy_screen="on", itl_target_s=LEAST),
    Setting("ahead", block_size=4, async_scheduling=True, itl_target_s=LEAST),
)


# Whose layers can be given some of a step's rows. One meets every kind of setting; the others, whose layers
# differ, the one that asks most, which computes each prompt again and again. The rest is in the broad suite.
USUAL, MORE = ("llama", "qwen2", "qwen3", "mistral"), ("llama-plain-rope", "granite")
ASKS_MOST, ASKS_NO_MORE = "preempted", "blocks-of-16"  # than that one, whose blocks are as large


def _cases() -> Iterator[Any]:
    families = {family.name: family for family in (*FAMILIES, *MORE_FAMILIES)}
    for name in (*USUAL, *MORE):
        for setting in SETTINGS:
            marks: tuple[pytest.MarkDecorator, ...] = ()
            if name in MORE:
                marks = (pytest.mark.long,)
            elif setting.name == ASKS_NO_MORE or (name != USUAL[0] and setting.name != ASKS_MOST):
                marks = (pytest.mark.long, pytest.mark.broad)
            yield pytest.param(families[name], setting, id=f"{name}-{setting.name}", marks=marks)


@pytest.fixture(scope="module")
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Runners, list[tuple[int, ...]]]]:
    """Of four layers, where the family does not say how many; and what `generate` says."""
    family: Family = request.param
    if "layer_types" not in family.settings and "num_hidden_layers" not in family.settings:
        family = replace(family, settings={**family.settings, "num_hidden_layers": 4})
    folder = families.save(family, tmp_path_factory.mktemp(family.name))
    runners = Runners(folder, "cpu")
    yield runners, families.expected(folder, torch.device("cpu"))
    runners.close()


@pytest.mark.parametrize(("saved", "setting"), [*_cases()], indirect=["saved"])
def test_greedy_output_is_generates(
    saved: tuple[Runners, list[tuple[int, ...]]], setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners, wanted = saved
    spans = 0
    launch = ModelRunner.launch

    def counting(
        self: ModelRunner, sequences: list[ScheduledSequence], before: LaunchedStep | None = None
    ) -> LaunchedStep:
        nonlocal spans
        spans += sequences[-1].layers is not None
        return launch(self, sequences, before)

    monkeypatch.setattr(ModelRunner, "launch", counting)
    with known_pace(SLOW):
        engines.check_family(runners, setting, wanted)
    assert spans > 10
