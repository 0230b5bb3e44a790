"""The whole engine on a card as it is served: bfloat16, recorded decode steps, blocks as memory has room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from replica.attention import triton_paged
from replica.attention.kv_pages import LayerShape
from replica.config import ReplicaConfig
from replica.models.model_source import NotEnoughMemory, resolve
from replica.runners.model_runner import ModelRunner
from tests import family_engines as engines
from tests import model_families as families
from tests.family_engines import Answer, Setting
from tests.model_families import FAMILIES, MAX_NEW_TOKENS, Family

CUDA = torch.device("cuda", 0)
SETTING = Setting("bfloat16", max_running=12)
# Dense, and one whose layers have a window, a softcap and capped logits.
NETWORKS = [family for family in FAMILIES if family.name in ("qwen3", "gemma2")]
# Between the logits of tokens that bfloat16 may take either of: those of these networks are below 8, where it
# keeps 1/32, and few layers add to that.
MOST_GAP = 0.25
MEMORY_FRACTION = 0.01  # of a card, the least there is: tens of thousands of blocks of so small a network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


def _why_no_kernels() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device here"
    return triton_paged.why_not(CUDA, torch.bfloat16, [LayerShape(2, 64, 64)])


NEEDS_KERNELS = pytest.mark.skipif(_why_no_kernels() is not None, reason=str(_why_no_kernels()))


def config_of(folder: Path, **settings: object) -> ReplicaConfig:
    return ReplicaConfig(**{"model": str(folder), "device": CUDA.type, "dtype": "bfloat16", **settings})  # type: ignore[arg-type]


def exact_logits(folder: Path) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """What transformers says comes next, in float32 of the weights as bfloat16 has them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    model = model.float().eval().to(CUDA)

    def next_logits(tokens: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([tokens], device=CUDA)).logits[0, -1]
            return logits

    return next_logits


def check_alike(
    some: Sequence[Answer],
    others: Sequence[Answer],
    next_logits: Callable[[tuple[int, ...]], torch.Tensor],
    when: str,
) -> None:
    """The same tokens, or parting where either is as good: what follows then answers another text."""
    for prompt, one, other in zip(families.prompts(), some, others, strict=True):
        for place, pair in enumerate(zip(one.token_ids, other.token_ids, strict=True)):
            if pair[0] != pair[1]:
                logits = next_logits((*prompt, *one.token_ids[:place]))
                gap = float((logits[pair[0]] - logits[pair[1]]).abs())
                assert gap <= MOST_GAP, f"{when}: tokens {pair} at {place} lie {gap:.3f} apart"
                break


@pytest.mark.parametrize("backend", ["gather_sdpa", pytest.param("auto", marks=NEEDS_KERNELS)])
@pytest.mark.parametrize("family", NETWORKS, ids=lambda family: family.name)
def test_in_bfloat16_warm_is_cold_and_replayed_is_computed(
    family: Family, backend: str, tmp_path: Path
) -> None:
    folder = families.save(family, tmp_path)
    next_logits = exact_logits(folder)
    answers: dict[str, list[Answer]] = {}
    for way, is_recorded in (("computed", False), ("replayed", True)):
        config = config_of(folder, attention_backend=backend, cuda_graphs=is_recorded, num_blocks=1024)
        runner = ModelRunner.load(config, resolve(str(folder)))
        try:
            assert runner.info.kv_dtype == "bfloat16"
            engine = engines.engine_over(runner, SETTING)
            answers[f"{way}, cold"] = engines.answer_all(engine, families.prompts(), at_once=4)
            answers[f"{way}, warm"] = engines.answer_all(engine, families.prompts(), at_once=4)
            assert runner.info.attention_backend == ("triton" if backend == "auto" else backend)
            if is_recorded and backend == "auto":
                assert runner._graphs is not None
                assert runner._graphs.num_replays > 0, "nothing was replayed"
        finally:
            runner.close()
    first = answers["computed, cold"]
    assert {len(answer.token_ids) for answer in first} == {MAX_NEW_TOKENS}
    assert any(answer.cached_tokens for answer in answers["computed, warm"])
    for when, others in answers.items():
        check_alike(first, others, next_logits, when)


@pytest.mark.parametrize("device_share", [1.0, 0.5])
def test_blocks_are_counted_from_the_memory_that_is_free(device_share: float, tmp_path: Path) -> None:
    """Nobody says how many: they take the part they may, and a full step still fits beside them."""
    folder = families.save(NETWORKS[0], tmp_path)
    config = config_of(folder, block_size=64, kv_memory_fraction=MEMORY_FRACTION, device_share=device_share)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(CUDA)
    runner = ModelRunner.load(config, resolve(str(folder)))
    try:
        taken = runner.info.num_blocks * runner.info.kv_bytes_per_block
        most = MEMORY_FRACTION * min(free, device_share * total)
        assert 0.5 * most < taken <= most
        assert runner.warm_up() > 0
        setting = Setting("counted", block_size=64, num_blocks=runner.info.num_blocks)
        answers = engines.answer_all(engines.engine_over(runner, setting), families.prompts())
        assert {len(answer.token_ids) for answer in answers} == {MAX_NEW_TOKENS}
    finally:
        runner.close()


def test_more_blocks_than_memory_holds_are_refused(tmp_path: Path) -> None:
    folder = families.save(NETWORKS[0], tmp_path)
    with pytest.raises(NotEnoughMemory, match="KV blocks"):
        ModelRunner.load(config_of(folder, num_blocks=1 << 30), resolve(str(folder)))
