"""A model in parts answers as the whole does, for every family with a plan; what cannot be cut is refused.

The ranks are threads here, so that a forward of every family costs milliseconds.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch

from cache.errors import ConfigError
from replica.models import model_probe
from replica.models.model_probe import Unsupported
from replica.parallel import tp_plan
from replica.parallel.sharding import shard
from tests.model_families import FAMILIES, MORE_FAMILIES, Family

FAMILY_BY_NAME = {family.name: family for family in (*FAMILIES, *MORE_FAMILIES)}
WITHOUT_A_PLAN = ("gpt2", "gpt_oss", "opt", "stablelm")
PLANNED_LATER = ("nemotron",)  # not in every version of transformers that is served
PLANNED = [name for name in FAMILY_BY_NAME if name not in WITHOUT_A_PLAN]

_T = TypeVar("_T")


class Meeting:
    """What ranks in threads share: each waits until all have brought theirs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=30)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, part: torch.Tensor) -> list[torch.Tensor]:
        self._parts[rank] = part
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts

    def each(self, compute: Callable[[ThreadRanks], _T]) -> list[_T]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(compute, [ThreadRanks(rank, self) for rank in range(self.size)]))


class ThreadRanks:
    """`Ranks`."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meeting.exchange(self.rank, tensor)).sum(0)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._meeting.exchange(self.rank, tensor), dim=-1)


def drawn(family: Family, **changes: Any) -> Any:
    """The family's small network, in eval mode."""
    from transformers import AutoModelForCausalLM

    config = family.config()
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model_probe.run(model, torch.tensor([[5, 1700, 23, 23, 911, 40]]), torch.arange(6)[None])[0]


def parts_of(model: Any, size: int) -> list[torch.Tensor]:
    """What each rank says, after it has cut its own copy."""
    copies = [copy.deepcopy(model) for _ in range(size)]

    def answer(ranks: ThreadRanks) -> torch.Tensor:
        shard(copies[ranks.rank], tp_plan.plan_of(model), ranks)
        return logits_of(copies[ranks.rank])

    return Meeting(size).each(answer)


@pytest.mark.parametrize("name", PLANNED)
def test_parts_answer_as_the_whole(name: str) -> None:
    model = drawn(FAMILY_BY_NAME[name])
    if name in PLANNED_LATER and not model.config.base_model_tp_plan:
        pytest.skip("this transformers has no plan for it")
    whole = logits_of(model)
    for part in parts_of(model, 2):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-4)


def test_an_output_layer_that_is_the_embedding_stays_one_and_is_computed_in_parts() -> None:
    """Of 1,857 words the last of four ranks has one fewer; none cuts a row off the embedding."""
    model = drawn(FAMILY_BY_NAME["smollm3"], tie_word_embeddings=True, vocab_size=1858, num_key_value_heads=4)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    whole = logits_of(model)
    assert whole.shape[-1] == 1858
    for part in parts_of(model, 4):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-4)


def test_a_rank_holds_its_part_alone() -> None:
    model = drawn(FAMILY_BY_NAME["llama"])
    whole = sum(each.numel() for each in model.model.layers.parameters())
    shard(model, tp_plan.plan_of(model), ThreadRanks(1, Meeting(2)))
    norms = sum(each.numel() for name, each in model.model.layers.named_parameters() if "norm" in name)
    held = sum(each.numel() for each in model.model.layers.parameters())
    assert held - norms == (whole - norms) / 2
    storage = model.model.layers[0].mlp.down_proj.weight.untyped_storage()
    assert storage.nbytes() == model.model.layers[0].mlp.down_proj.weight.nbytes, (
        "the whole is kept behind it"
    )


@pytest.mark.parametrize("name", WITHOUT_A_PLAN)
def test_a_family_without_a_plan_is_refused(name: str) -> None:
    with pytest.raises(Unsupported, match="no plan"):
        tp_plan.plan_of(model_probe.without_weights(FAMILY_BY_NAME[name].config(), torch.float32))


def test_a_style_that_is_not_served_is_refused_by_name() -> None:
    model = drawn(FAMILY_BY_NAME["llama"])
    model.config.base_model_tp_plan = {**model.config.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    with pytest.raises(Unsupported, match="embedding_rowwise"):
        tp_plan.plan_of(model)


@pytest.mark.parametrize(
    ("settings", "num_ranks", "number"),
    [
        ({}, 4, "2 key/value heads"),
        ({}, 8, "4 attention heads"),
        ({"num_key_value_heads": 4}, 3, "4 attention heads"),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_both_numbers(
    settings: dict[str, int], num_ranks: int, number: str
) -> None:
    model = drawn(FAMILY_BY_NAME["llama"], **settings)
    with pytest.raises(ConfigError, match=f"tensor_parallel = {num_ranks}: .*{number}"):
        tp_plan.check_heads(model.config, tp_plan.plan_of(model), num_ranks)


def test_other_sizes_that_do_not_divide_are_refused_with_both_numbers() -> None:
    model = drawn(FAMILY_BY_NAME["llama"], intermediate_size=97)
    with pytest.raises(ConfigError, match=r"tensor_parallel = 2: must divide the 97 of .*mlp"):
        shard(model, tp_plan.plan_of(model), ThreadRanks(0, Meeting(2)))
