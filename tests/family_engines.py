"""Our engine over a family's network, in many settings, and what it must reproduce exactly.

Shared by the exactness tests on CPU and on CUDA: the settings and the comparison are the same; only the
device differs. The networks and what is expected of them: `model_families.py`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cache.block_hash import BlockHasher
from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.messages import GenerateRequest, SamplingParams
from cache.types import RequestId
from replica.config import ReplicaConfig
from replica.engine.engine_core import EngineCore
from replica.models.model_source import resolve
from replica.runners.model_runner import ModelRunner
from replica.scheduling.request import Request
from replica.structures.compiler import Structures
from tests.model_families import MAX_NEW_TOKENS, prompts

ROOMY_BLOCKS = 1024  # holds everything any of these tests computes: nothing is ever evicted


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run the engine; none may change a single token."""

    name: str
    block_size: int = 16
    num_blocks: int = ROOMY_BLOCKS
    prefix_caching: bool = True
    cache_discipline: str = "merge_on_fill"
    max_batched_tokens: int = 512
    max_running: int = 64
    host_cache_gib: float = 0.0
    preemption: str = "recompute"
    async_scheduling: bool | str = "auto"
    greedy_screen: str = "off"  # these networks are too small for it to pay; "on" all the same
    itl_target_s: float = math.inf

    @property
    def is_roomy(self) -> bool:
        return self.num_blocks == ROOMY_BLOCKS

    @property
    def preempts(self) -> bool:
        """Whether somebody is sure to be put back. With host memory answers may be short of nothing."""
        return not self.is_roomy and not (self.host_cache_gib and self.preemption == "recompute")


SETTINGS = (
    Setting("cache-on"),
    Setting("cache-on-blocks-of-4", block_size=4),
    Setting("cache-off", prefix_caching=False),
    Setting("append-only-blocks-of-4", block_size=4, max_batched_tokens=23, cache_discipline="append_only"),
    Setting("chunked", max_batched_tokens=23),
    Setting("chunked-blocks-of-4", block_size=4, max_batched_tokens=23),
    Setting("preempted", num_blocks=9),
    Setting("preempted-blocks-of-4", block_size=4, num_blocks=28, max_batched_tokens=23),
    Setting("host-memory", block_size=4, num_blocks=30, max_batched_tokens=23, host_cache_gib=0.01),
    Setting("swapped", num_blocks=9, host_cache_gib=0.01, preemption="swap"),
    Setting("screened", block_size=4, max_batched_tokens=23, greedy_screen="on"),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine made of one prompt."""

    token_ids: tuple[int, ...]
    cached_tokens: int
    num_preemptions: int


class Runners:
    """Runners over one model folder, loaded as the service loads them; one per pool and way to draw."""

    def __init__(self, folder: Path, device: str, attention_backend: str = "auto") -> None:
        self._folder, self._device, self._attention_backend = folder, device, attention_backend
        self._loaded: dict[tuple[int, int, str, float], ModelRunner] = {}

    def get(
        self, block_size: int, num_blocks: int, greedy_screen: str = "off", host_cache_gib: float = 0.0
    ) -> ModelRunner:
        key = (block_size, num_blocks, greedy_screen, host_cache_gib)
        if key not in self._loaded:
            config = ReplicaConfig(
                model=str(self._folder),
                device=self._device,
                attention_backend=self._attention_backend,
                dtype="float32",
                block_size=block_size,
                num_blocks=num_blocks,
                greedy_screen=greedy_screen,
                host_cache_gib=host_cache_gib,
                torch_threads=1,
            )
            self._loaded[key] = ModelRunner.load(config, resolve(str(self._folder)))
        return self._loaded[key]

    def engine(self, setting: Setting, structures: Structures | None = None) -> EngineCore:
        """An engine with an empty cache, over pages that hold what earlier ones left."""
        runner = self.get(
            setting.block_size, setting.num_blocks, setting.greedy_screen, setting.host_cache_gib
        )
        return engine_over(runner, setting, structures)

    def close(self) -> None:
        for runner in self._loaded.values():
            runner.close()


def engine_over(runner: ModelRunner, setting: Setting, structures: Structures | None = None) -> EngineCore:
    config = ReplicaConfig(
        block_size=setting.block_size,
        prefix_caching=setting.prefix_caching,
        cache_discipline=setting.cache_discipline,
        host_cache_gib=setting.host_cache_gib,
        preemption=setting.preemption,
        max_batched_tokens=setting.max_batched_tokens,
        max_running=setting.max_running,
        async_scheduling=setting.async_scheduling,
        itl_target_s=setting.itl_target_s,
    )
    mark = Fingerprint("family", "saved", "float32", "", setting.block_size, HashAlgorithm.XXH3_128)
    engine = EngineCore(runner, config, BlockHasher(mark), structures=structures)
    if engine._cache.host is not None:
        # Whether it pays is measured, and on a card computing these networks' blocks takes no longer.
        engine._cache.host.is_cheaper = lambda *_: True
    return engine


GREEDY = SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=0.0, ignore_eos=True)


def answer_all(
    engine: EngineCore,
    questions: Sequence[tuple[int, ...]],
    *,
    sampling: SamplingParams = GREEDY,
    at_once: int | None = None,
    seed: int = 0,
) -> list[Answer]:
    """Run the prompts to their end. at_once: so many first, then one more with each step; None = all.

    A prompt's seed is `seed` plus its index. Checks the pool's laws on the way and that nothing is
    held at the end.
    """
    waiting = [
        GenerateRequest(RequestId(f"q{index}"), array("i", prompt), len(prompt), sampling, seed + index)
        for index, prompt in enumerate(questions)
    ]
    taken: list[Request] = []
    first = len(waiting) if at_once is None else at_once
    taken += [engine.submit(request) for request in waiting[:first]]
    late = waiting[first:]
    while engine.has_work or late:
        if late:
            taken.append(engine.submit(late.pop(0)))
        for progress in engine.step():
            if progress.error is not None:
                raise progress.error
        check_pool(engine)
    assert engine.stats().cache.used == 0, "a finished request still holds blocks"
    return [
        Answer(tuple(r.token_ids[r.num_prompt_tokens :]), r.cached_tokens or 0, r.num_preemptions)
        for r in taken
    ]


def check_pool(engine: EngineCore) -> None:
    """free + used = total, at any time."""
    cache = engine.stats().cache
    assert cache.free + cache.used == cache.total, f"{cache.free} free + {cache.used} used != {cache.total}"


def hit_tokens(prompt: tuple[int, ...], earlier: Sequence[tuple[int, ...]], block_size: int) -> int:
    """Naive: the longest run of leading full blocks that an earlier prompt has too, one token left over."""
    most = (len(prompt) - 1) // block_size
    longest = 0
    for other in earlier:
        shared = 0
        while (
            shared < min(most, len(other) // block_size)
            and prompt[: (shared + 1) * block_size] == other[: (shared + 1) * block_size]
        ):
            shared += 1
        longest = max(longest, shared)
    return longest * block_size


def check_family(runners: Runners, setting: Setting, wanted: list[tuple[int, ...]]) -> None:
    """Cold, warm, with late arrivals: token for token what was wanted, and cached exactly what could be."""
    questions = prompts()
    engine = runners.engine(setting)
    cold = answer_all(engine, questions)
    check_answers(cold, wanted, "cold")
    warm = answer_all(engine, questions)
    check_answers(warm, wanted, "warm")
    late = answer_all(runners.engine(setting), questions, at_once=3)
    check_answers(late, wanted, "with late arrivals")

    preemptions = engine.stats().preemptions
    if not setting.is_roomy:
        assert preemptions > 0 or not setting.preempts, "the pool was too large to prove anything"
        if setting.host_cache_gib:
            totals = engine.report(epoch=1, number=1)
            assert totals.host_loads > 0, "nothing came back from host memory"
            assert (totals.swapped > 0) == (setting.preemption == "swap")
            assert totals.host_blocks <= totals.max_host_blocks
        return
    assert preemptions == 0
    size = setting.block_size
    for index, prompt in enumerate(questions):
        earlier = questions[:index] if setting.prefix_caching else ()
        both = questions if setting.prefix_caching else ()
        assert cold[index].cached_tokens == hit_tokens(prompt, earlier, size), f"cold prompt {index}"
        assert warm[index].cached_tokens == hit_tokens(prompt, both, size), f"warm prompt {index}"
        assert late[index].cached_tokens == cold[index].cached_tokens, f"late prompt {index}"


def check_answers(answers: Sequence[Answer], wanted: Sequence[tuple[int, ...]], when: str) -> None:
    for index, (answer, right) in enumerate(zip(answers, wanted, strict=True)):
        assert answer.token_ids == right, f"{when}: prompt {index}: {answer.token_ids} is not {right}"


def check_variety(wanted: Sequence[tuple[int, ...]]) -> None:
    """Answers that say little could be right by accident."""
    most_tokens_differ = [len(set(answer)) >= MAX_NEW_TOKENS // 2 for answer in wanted]
    assert sum(most_tokens_differ) >= len(wanted) // 2, "the network repeats itself: choose other weights"
    assert len(set(wanted)) >= len(set(prompts())) - 2, "the network does not look at its prompt"


def check_conversation(runners: Runners, setting: Setting) -> None:
    """A second turn on top of the first answer reuses the answer's blocks too, and says the same as cold."""
    engine, size = runners.engine(setting), setting.block_size
    for prompt in (prompts()[0], prompts()[3], prompts()[7]):
        first = answer_all(engine, [prompt])[0]
        second_prompt = prompt + first.token_ids + prompts()[11]
        warm = answer_all(engine, [second_prompt])[0]
        # The last token of an answer is never computed, so the block it would have filled has no K/V.
        assert warm.cached_tokens == (len(prompt) + MAX_NEW_TOKENS - 1) // size * size
        cold = answer_all(runners.engine(replace(setting, prefix_caching=False)), [second_prompt])[0]
        assert warm.token_ids == cold.token_ids
        assert cold.cached_tokens == 0
