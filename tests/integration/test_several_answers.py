"""Several answers to one prompt by a real model, through the engine's thread: shared blocks, a copied one."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cache.messages import AnswerSoFar, Delta, FinishReason, GenerateRequest
from replica.assembly import Assembly, assemble
from replica.config import ReplicaConfig
from replica.engine.answers import answer_seed
from replica.engine.engine import Engine
from tests.fakes.engine import make_request

N = 4
CONFIG = ReplicaConfig(num_blocks=96, torch_threads=1, max_batched_tokens=24)


@pytest.fixture(scope="module", params=[True, False], ids=["prefix caching", "none"])
def assembly(request: pytest.FixtureRequest) -> Iterator[Assembly]:
    loaded = assemble(replace(CONFIG, prefix_caching=request.param))
    yield loaded
    loaded.runner.close()


def asked(num_prompt: int, *, temperature: float = 1.0, max_tokens: int = 12) -> GenerateRequest:
    prompt = [(7 * i * i + 3 * i) % 200 for i in range(num_prompt)]
    return make_request("r", prompt, max_tokens=max_tokens, temperature=temperature, seed=11, ignore_eos=True)


async def collect(engine: Engine, request: GenerateRequest) -> dict[int, list[Delta]]:
    found: dict[int, list[Delta]] = {}
    async with contextlib.aclosing(engine.generate(request)) as deltas:
        async for delta in deltas:
            found.setdefault(delta.choice, []).append(delta)
    return found


def tokens(deltas: list[Delta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)


@pytest.mark.parametrize("num_prompt", [1, 16, 17, 45])
def test_each_answer_is_the_one_it_would_be_alone(assembly: Assembly, num_prompt: int) -> None:
    """At every place in a block where a prompt can end, and in chunks."""
    request = asked(num_prompt)
    several = assembly.core().complete([replace(request, n=N)])
    for choice, answer in enumerate(several):
        own = replace(request, seed=answer_seed(request.seed, choice))
        [alone] = assembly.core().complete([own])
        assert answer.token_ids == alone.token_ids
        assert answer.text == alone.text
    assert len({answer.token_ids for answer in several}) > 1


def test_the_prompt_is_computed_once(assembly: Assembly) -> None:
    core = assembly.core()
    core.complete([replace(asked(90, max_tokens=1), n=N)])
    assert core.stats().computed_tokens == 90 + N - 1


async def test_a_stream_carries_all_answers_to_their_ends(assembly: Assembly) -> None:
    core, request = assembly.core(), replace(asked(40), n=N)
    whole = assembly.core().complete([request])
    async with Engine(core, CONFIG) as engine:
        found = await collect(engine, request)
        assert [tokens(found[choice]) for choice in range(N)] == [answer.token_ids for answer in whole]
        for deltas in found.values():
            assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert deltas[-1].finish_reason is FinishReason.LENGTH
        # Another replica goes on with it: one is over, one has not begun.
        lengths = [12, 0, 5, 11]
        answers = tuple(
            AnswerSoFar(array("i", answer.token_ids[:length]), 0, is_over=length == 12)
            for answer, length in zip(whole, lengths, strict=True)
        )
        rest = await collect(engine, replace(request, answers=answers, attempt=1))
        assert sorted(rest) == [1, 2, 3]
        for choice, deltas in rest.items():
            assert tokens(deltas) == whole[choice].token_ids[lengths[choice] :]


async def test_whoever_hangs_up_gives_all_blocks_back(assembly: Assembly) -> None:
    core = assembly.core()
    async with Engine(core, CONFIG) as engine:
        deltas = engine.generate(replace(asked(40, max_tokens=400), n=N))
        assert (await anext(deltas)).token_ids
        await deltas.aclose()
        async with asyncio.timeout(20):
            while engine.load().num_running or engine.load().num_waiting:  # noqa: ASYNC110 - another thread's
                await asyncio.sleep(0.01)
        assert engine.stats().cache.used == 0
