"""From a `ReplicaConfig` to the parts of a running engine: model, tokenizer, runner, hash rule.

Shared by the Serve replica (`server.py`) and the offline commands (`ask.py`): both run the same engine.
torch is imported only when a model is loaded. Knows no threads, no sockets, no Ray.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cache.block_hash import BlockHasher
from cache.fingerprint import ChatTemplate, Fingerprint, template_digest
from cache.host_tier import TierEventSink
from cache.tokenizer_decoder import TokenizerDecoder
from replica.config import ReplicaConfig
from replica.engine.engine_core import EngineCore
from replica.engine.watchdog import end_process
from replica.models.model_source import ResolvedModel, resolve
from replica.models.tokenizer_source import load_tokenizer
from replica.output.detokenizer import TokenDecoder
from replica.runners.sim_runner import SimRunner
from replica.scheduling.runner import Runner, RunnerInfo
from replica.structures.compiler import NoStructures, StructureCompiler, Structures
from replica.structures.vocabulary import StructureVocabulary, TokenizerUnsuited

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assembly:
    """A loaded runner and what belongs to it."""

    config: ReplicaConfig
    model: ResolvedModel
    tokenizer: Any  # transformers' own
    decoder: TokenDecoder
    runner: Runner
    structures: Structures
    fingerprint: Fingerprint

    def core(
        self, *, sink: TierEventSink | None = None, clock: Callable[[], float] = time.monotonic
    ) -> EngineCore:
        """An engine over the runner. One at a time: the runner's pages belong to it."""
        return EngineCore(
            self.runner,
            self.config,
            BlockHasher(self.fingerprint),
            decoder=self.decoder,
            spelling_decoder=TokenizerDecoder(self.tokenizer, spells_special=True),
            structures=self.structures,
            sink=sink,
            clock=clock,
        )


def assemble(config: ReplicaConfig) -> Assembly:
    """Find the model and load what the config asks for. Takes seconds to minutes; shows progress.

    Raises ConfigError (ModelRefused, NotEnoughMemory) for what cannot be served.
    """
    model = resolve(config.model, config.revision)
    tokenizer = load_tokenizer(model)
    runner = (
        _simulated(config, tokenizer) if config.runner == "simulated" else _loaded(config, model, tokenizer)
    )
    fingerprint = replica_fingerprint(
        config, model, kv_dtype=runner.info.kv_dtype, chat_template=getattr(tokenizer, "chat_template", None)
    )
    structures = _structures(tokenizer, runner.info)
    return Assembly(config, model, tokenizer, TokenizerDecoder(tokenizer), runner, structures, fingerprint)


def replica_fingerprint(
    config: ReplicaConfig, model: ResolvedModel, *, kv_dtype: str, chat_template: ChatTemplate
) -> Fingerprint:
    """What this replica's block hashes stand for. The simulated runner's KV dtype is "simulated"."""
    return Fingerprint(
        model_id=model.model_id,
        revision=model.revision,
        kv_dtype=kv_dtype,
        template_digest=template_digest(chat_template),
        block_size=config.block_size,
        hash_algorithm=config.hash_algorithm,
    )


def _structures(tokenizer: Any, info: RunnerInfo) -> Structures:
    try:
        vocabulary = StructureVocabulary(
            tokenizer, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids
        )
    except TokenizerUnsuited as error:
        logger.warning("no structured output with this tokenizer", extra={"reason": str(error)})
        return NoStructures(f"this model's tokenizer does not do for structured output: {error}")
    return StructureCompiler(vocabulary)


def _simulated(config: ReplicaConfig, tokenizer: Any) -> SimRunner:
    """A simulated machine that speaks the model's tokens, so that prompts and text are real."""
    sim = replace(
        config.sim,
        vocab_size=len(tokenizer),
        num_blocks=config.num_blocks or config.sim.num_blocks,
        max_model_len=config.max_model_len or config.sim.max_model_len,
    )
    return SimRunner(
        sim,
        block_size=config.block_size,
        clock=time.monotonic,
        host_cache_gib=config.host_cache_gib,
    )


def _loaded(config: ReplicaConfig, model: ResolvedModel, tokenizer: Any) -> Runner:
    from replica.runners.model_runner import ModelRunner
    from replica.runners.parallel_runner import ParallelRunner

    began_s = time.monotonic()
    tokenizer_eos: int | None = getattr(tokenizer, "eos_token_id", None)
    runner: Runner
    if config.tensor_parallel > 1:
        # A part of the model that has gone is a dead engine, whatever its thread is waiting for.
        runner = ParallelRunner.load(config, model, on_lost=end_process, tokenizer_eos=tokenizer_eos)
    else:
        runner = ModelRunner.load(config, model, tokenizer_eos=tokenizer_eos)
    logger.info(
        "model loaded", extra={"model": model.model_id, "took_s": round(time.monotonic() - began_s, 1)}
    )
    return runner
