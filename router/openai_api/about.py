"""What the server says of itself: its model, its build, its replicas, and whether it is ready.

Knows the configuration and the fleet; knows neither HTTP nor requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cache import block_hash
from router.config import RouterConfig
from router.errors import UnknownModel
from router.index import packed_table
from router.openai_api.responses import ModelCard, ModelList
from router.placement import passing, use_counts
from router.placement.routing import Routing
from router.placement.routing_statistics import ReplicaStatistics
from router.pricing import cost
from router.prompts.prompt import PromptEncoder
from router.sampling import MAX_TOKENS, Sampling

DECIDING = (packed_table, cost, passing, use_counts)  # what a decision has in C


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests are routed with knowledge of every cache, and if not, why not."""

    reason: str | None  # None = ready
    num_replicas: int


@dataclass(frozen=True, slots=True)
class About:
    """Answers to `/v1/models` and `/version`. Stateless beside its parts."""

    config: RouterConfig
    encoder: PromptEncoder
    routing: Routing
    build: str  # of this software
    started_at: int  # unix seconds

    def max_model_len(self) -> int | None:
        """Prompt and output tokens that fit every known replica; None while there is none."""
        return min((info.max_model_len for info in self.routing.replicas.values()), default=None)

    def vocab_size(self) -> int:
        """Token ids that the tokenizer and every known replica's model have, from 0.

        A tokenizer may have tokens that its model has no embedding for, as Gemma 3's of 1B does.
        """
        infos = self.routing.replicas.values()
        told = [info.vocab_size for info in infos if info.vocab_size is not None]
        return min([self.encoder.vocab_size, *told])

    def models(self) -> ModelList:
        return ModelList(object="list", data=[self._card()])

    def model(self, name: str) -> ModelCard:
        """Raises UnknownModel."""
        if name != self.config.model_name:
            raise UnknownModel(name, [self.config.model_name])
        return self._card()

    def version(self) -> dict[str, Any]:
        """What runs here: build and model, how requests are placed, each replica and what it is doing."""
        mark = self.config.fingerprint
        return {
            "version": self.build,
            "model": self.config.model_name,
            "revision": mark.revision,
            "fingerprint": mark.digest(),
            "policy": self.config.policy,
            "hash_algorithm": mark.hash_algorithm.value,
            "compiled_hashes": block_hash.IS_COMPILED,
            "compiled_decisions": all(module.IS_COMPILED for module in DECIDING),
            "has_chat_template": self.encoder.has_chat_template,
            "default_sampling": Sampling.model_validate(
                {**self.config.sampling_defaults, MAX_TOKENS: self.config.default_max_tokens}
            ).model_dump(),
            "replicas": [self._replica(numbers) for numbers in self.routing.statistics().replicas],
        }

    def _replica(self, numbers: ReplicaStatistics) -> dict[str, Any]:
        """One replica, without its addresses: they are nobody's business outside."""
        info = self.routing.replicas[numbers.replica_id]
        return {
            "replica_id": numbers.replica_id,
            "pid": info.pid,
            "device": info.device,
            "num_ranks": info.num_ranks,
            "attention_backend": info.attention_backend,
            "kv_dtype": info.fingerprint.kv_dtype,
            "num_blocks": info.num_blocks,
            "block_size": info.fingerprint.block_size,
            "max_model_len": info.max_model_len,
            "shares_fingerprint": numbers.is_matched,
            "num_running": numbers.num_running,
            "num_waiting": numbers.num_waiting,
            "num_cached_blocks": numbers.num_blocks,
        }

    def _card(self) -> ModelCard:
        return ModelCard(
            id=self.config.model_name,
            object="model",
            created=self.started_at,
            owned_by="warmpath",
            root=self.config.fingerprint.model_id,
            max_model_len=self.max_model_len(),
        )
