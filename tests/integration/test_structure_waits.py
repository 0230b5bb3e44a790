"""Structures are compiled beside the engine's thread: steps wait for none, and whoever asked hears of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cache.block_hash import BlockHasher
from cache.errors import StructureRefused
from cache.messages import GenerateRequest
from cache.structure import Structure
from replica.config import SimConfig
from replica.engine.engine import Engine
from replica.engine.engine_core import EngineCore
from replica.runners.sim_runner import SimRunner
from replica.structures.compiler import StructureCompiler, compile_structure
from replica.structures.matcher import StructureMatcher
from replica.structures.vocabulary import StructureVocabulary
from tests.fakes.engine import fingerprint, make_request, sim_config
from tests.fakes.structures import (
    END,
    TOO_WIDE,
    TinyDecoder,
    asked,
    regex,
    schema,
    tiny_vocabulary,
)


class _Gate:
    """Compiles when it is let through."""

    def __init__(self) -> None:
        self.is_compiling = threading.Event()
        self.opened = threading.Event()

    def __call__(self, vocabulary: StructureVocabulary, structure: Structure) -> StructureMatcher:
        self.is_compiling.set()
        assert self.opened.wait(30)
        return compile_structure(vocabulary, structure)


@asynccontextmanager
async def _running(gate: _Gate) -> AsyncIterator[Engine]:
    config = sim_config(256, sim=SimConfig(base_s=0.0005, vocab_size=tiny_vocabulary().vocab_size))
    structures = StructureCompiler(tiny_vocabulary(), build=gate)
    core = EngineCore(
        SimRunner(config.sim, block_size=config.block_size, eos_token_ids=frozenset({0, END})),
        config,
        BlockHasher(fingerprint(config.block_size)),
        decoder=TinyDecoder(),
        structures=structures,
    )
    try:
        async with Engine(core, config) as engine:
            yield engine
    finally:
        gate.opened.set()
        structures.close()


async def _say(engine: Engine, request: GenerateRequest) -> str:
    return "".join([delta.text async for delta in engine.generate(request)])


async def test_steps_wait_for_nobodys_compilation() -> None:
    gate = _Gate()
    async with _running(gate) as engine:
        waiting = asyncio.create_task(_say(engine, asked(regex("yes"))))
        await asyncio.to_thread(gate.is_compiling.wait, 30)
        for seed in range(5):
            await _say(engine, make_request(f"free{seed}", range(9), max_tokens=20, seed=seed))
        assert not waiting.done()
        gate.opened.set()
        assert await waiting == "yes"


async def test_who_leaves_while_it_is_compiled_leaves_nothing() -> None:
    gate = _Gate()
    async with _running(gate) as engine:
        waiting = asyncio.create_task(_say(engine, asked(regex("yes"))))
        await asyncio.to_thread(gate.is_compiling.wait, 30)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.opened.set()
        assert await _say(engine, asked(regex("yes"))) == "yes"  # of the same name
        assert engine.load().num_running == engine.load().num_waiting == 0


async def test_a_refusal_reaches_whoever_asked() -> None:
    gate = _Gate()
    gate.opened.set()
    async with _running(gate) as engine:
        with pytest.raises(StructureRefused):
            await _say(engine, asked(schema({"type": "array", "uniqueItems": True})))
        with pytest.raises(StructureRefused):
            await _say(engine, asked(TOO_WIDE))
        assert await _say(engine, asked(regex("yes"))) == "yes"
