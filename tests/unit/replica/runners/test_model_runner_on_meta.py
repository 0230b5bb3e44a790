"""A step on a device that is not the host, in bfloat16: torch's `meta`, whose tensors have no numbers.

Whatever a card would refuse or wait for shows there: two devices in one operation, two types, a number that
is read before its step is waited for. What `meta` lets pass all the same is refused by `AsOnACard`. What
comes back at the end of a step is made up.
"""

from __future__ import annotations

import traceback
from array import array
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config

from cache.messages import SamplingParams
from replica.attention import step_batch
from replica.attention.kv_pages import LayerPages
from replica.attention.step_batch import StepBatch
from replica.config import ReplicaConfig
from replica.layers.card_block import CardBlock
from replica.layers.layer_parts import parts_of
from replica.layers.layer_swap import Attending
from replica.layers.triton_rows import TritonRows
from replica.models import model_probe
from replica.output import sampler
from replica.runners.model_runner import ModelRunner
from replica.runners.queued_step import ModelStep
from replica.scheduling.runner import LaunchedStep, ScheduledSequence
from tests.fakes.launches import Launches
from tests.fakes.steps import scheduled

META = torch.device("meta")
CONFIG = Qwen3Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=8, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)
SHAPED = SamplingParams(
    max_tokens=8,
    temperature=0.8,
    presence_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias=((3, 1.0),),
    min_tokens=4,
    stop_token_ids=(5,),
)


class AsOnACard(TorchDispatchMode):
    """Refuses what `meta` lets pass and a card does not: an index on the host, products of two types; and
    what a card lets pass after waiting for all it has been given: numbers from memory that is not locked."""

    ACROSS_DEVICES = ("_to_copy", "to", "copy_")
    OF_ONE_TYPE = ("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "index_copy", "index_copy_")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        name = func.overloadpacket.__name__
        devices = {each.device.type for each in given if each.dim()}
        if len(devices) > 1 and name not in self.ACROSS_DEVICES:
            raise RuntimeError(f"{name} of tensors on {' and '.join(sorted(devices))}")
        dtypes = {str(each.dtype) for each in given if each.is_floating_point()}
        if len(dtypes) > 1 and name in self.OF_ONE_TYPE:
            raise RuntimeError(f"{name} of {' and '.join(sorted(dtypes))}")
        made = func(*args, **(kwargs or {}))
        is_brought = name in self.ACROSS_DEVICES and made.device.type != "cpu" and "cpu" in devices
        if is_brought and not any(each.name == "to_device" for each in traceback.extract_stack()):
            raise RuntimeError(f"{name} from the host, which a card's program waits for")
        return made


class Arriving:
    """In the place of `ToHost`: zeros, where there was nothing to bring."""

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.device.type == "meta", "a step's tokens were on the host already"
        self._shape = tensor.shape

    def take(self) -> torch.Tensor:
        return torch.zeros(self._shape, dtype=torch.int64)


def with_layers_for_cards(model: Any, launches: Launches) -> None:
    """In the places of its own. Nothing of `meta` can be compared: nobody asks whether they answer alike."""
    like: dict[str, Any] = {"device": META, "dtype": torch.bfloat16}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if type(child).__name__ == "Qwen3RMSNorm":
                setattr(parent, name, nn.RMSNorm(len(child.weight), child.variance_epsilon, **like))
    attending = Attending(4, 2, 16, 16**-0.5, window=None, softcap=None, sinks=None)
    for index, layer in enumerate(model.model.layers):
        parts = parts_of(layer, can_take=lambda _: True)
        assert parts is not None
        model.model.layers[index] = CardBlock(parts, attending, TritonRows(launches))


@pytest.fixture(scope="module", params=["as loaded", "for cards"])
def loaded(request: pytest.FixtureRequest) -> ModelRunner:
    model = model_probe.without_weights(CONFIG, torch.bfloat16)
    if request.param == "for cards":
        with_layers_for_cards(model, Launches())
    config = ReplicaConfig(block_size=4, num_blocks=64, max_running=8)
    return ModelRunner.with_pages(model, model_probe.probe_layers(model), config, "meta", max_model_len=128)


@pytest.fixture
def runner(loaded: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setattr(sampler, "ToHost", Arriving)
    return loaded


def launch(
    runner: ModelRunner, *sequences: ScheduledSequence, before: LaunchedStep | None = None
) -> ModelStep:
    """Begin a step; whatever it raises would only be told when it is waited for."""
    with AsOnACard():
        step = runner.launch(sequences, before)
    if not isinstance(step, ModelStep):
        step.result()
    assert isinstance(step, ModelStep)
    return step


def test_it_is_what_a_card_gets(runner: ModelRunner) -> None:
    assert (runner.info.device, runner.info.attention_backend) == ("meta", "gather_sdpa")
    assert runner.info.kv_dtype == "bfloat16"


PROMPT = scheduled("prompt", [0, 1, 2, 3, 4], 0, 18)
CHUNK = scheduled("chunk", [10, 11, 12, 13], 6, 7, num_tokens=15)  # goes on after it
LAST_CHUNK = scheduled("last chunk", [20, 21, 22], 4, 8)
DECODES = [
    scheduled("short", [30, 31], 5, 1),
    scheduled("at an edge", [32, 33, 34], 8, 1),
    scheduled("long", list(range(40, 56)), 60, 1),  # too long to share the others' padding
]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, SHAPED], ids=["greedy", "sampled", "shaped"])
@pytest.mark.parametrize(
    "step",
    [[PROMPT], [CHUNK], [LAST_CHUNK], DECODES, [*DECODES, PROMPT, CHUNK, LAST_CHUNK]],
    ids=["prompt", "chunk", "last chunk", "decodes", "mixed"],
)
def test_a_step_stays_on_its_device(
    runner: ModelRunner, step: list[ScheduledSequence], sampling: SamplingParams
) -> None:
    tokens = launch(runner, *(replace(item, sampling=sampling) for item in step)).result().next_tokens
    assert [token is not None for token in tokens] == [item.samples for item in step]


def test_penalties_follow_tokens_there(runner: ModelRunner) -> None:
    own = array("i", range(100, 118))
    sequence = replace(
        scheduled("a", list(range(8)), 17, 1), token_ids=own, num_prompt_tokens=17, sampling=SHAPED
    )
    for start in range(17, 20):
        assert launch(runner, replace(sequence, start=start)).result().next_tokens == (0,)
        own.append(0)


def test_what_a_structure_allows_is_brought_there(runner: ModelRunner) -> None:
    structure: Any = SimpleNamespace(num_words=512 // 32, fill=lambda words: words.fill(-1))
    assert launch(runner, replace(DECODES[0], structure=structure)).result().next_tokens == (0,)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_step_is_begun_before_the_tokens_of_the_one_before_are_there(
    runner: ModelRunner, sampling: SamplingParams
) -> None:
    """Six in a row, none of them waited for: keys and values are gathered, then kept and added to.

    Without penalties, which count tokens: such a step is not begun ahead.
    """
    own = array("i", range(100, 118))
    sequence = replace(
        scheduled("a", list(range(8)), 17, 1), token_ids=own, num_prompt_tokens=17, sampling=sampling
    )
    steps: list[ModelStep] = [launch(runner, sequence)]
    for start in range(18, 23):
        ahead = replace(sequence, start=start, drawn_by=0)
        steps.append(launch(runner, ahead, before=steps[-1]))
        own.append(0)
    assert [step.result().next_tokens for step in steps] == [(0,)] * 6


def test_a_fork_copies_its_block_there(runner: ModelRunner) -> None:
    forked = replace(scheduled("fork", [1, 9], 6, 1), copy_source=2)
    assert launch(runner, forked).result().next_tokens == (0,)


def on_the_host(array: object, _device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array)  # type: ignore[arg-type]


def read(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits[:, int(logits.sum())], logits.argmax(dim=-1)


def in_float32(pages: LayerPages, batch: StepBatch, key: torch.Tensor, value: torch.Tensor) -> None:
    pages.key_slots.index_copy_(0, batch.slots, key.float())


@pytest.mark.parametrize(
    ("place", "name", "wrong", "told"),
    [
        (step_batch, "to_device", on_the_host, "to from the host"),
        (sampler, "_largest", read, r"item\(\) cannot be called on meta"),
        (LayerPages, "write", in_float32, "index_copy_ of torch.bfloat16 and torch.float32"),
    ],
    ids=["a tensor on the host", "a number read", "two types"],
)
def test_what_a_card_would_refuse_or_wait_for_is_noticed(
    runner: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
    place: object,
    name: str,
    wrong: Callable[..., object],
    told: str,
) -> None:
    """This file would say nothing if it were not."""
    monkeypatch.setattr(place, name, wrong)
    with pytest.raises(RuntimeError, match=told):
        launch(runner, *DECODES)


def test_a_layer_for_cards_launches_four_kernels_for_all_of_a_steps_rows() -> None:
    """What they are told but for the number of rows is the same in every step: nothing is compiled anew."""
    model, launches = model_probe.without_weights(CONFIG, torch.bfloat16), Launches()
    with_layers_for_cards(model, launches)
    config = ReplicaConfig(block_size=4, num_blocks=64, max_running=8)
    runner = ModelRunner.with_pages(model, model_probe.probe_layers(model), config, "meta", max_model_len=128)
    told = []
    for step in (DECODES, [PROMPT]):
        launches.made.clear()
        with torch.inference_mode(), AsOnACard():
            runner._forward(StepBatch(step, 4, META, torch.bfloat16))
        assert [each.kernel for each in launches.made] == 2 * ["norm", "turn", "norm", "swish_product"]
        assert {each.grid[0] for each in launches.made} == {sum(item.num_new_tokens for item in step)}
        told.append([(each.grid[1:], each.options) for each in launches.made])
    assert told[0] == told[1]
