"""What the router's tests share: a clock, replicas on paper, prompts as hash chains."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cache.events import Load, QueuedPrompts, StepTimeModel
from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.messages import ReplicaInfo
from cache.scheduling_order import AGING
from cache.types import BlockHash, HashHint, ReplicaId, RequestId
from router.config import RouterConfig
from router.placement.observer import SilentObserver
from router.placement.routing import DecisionRecord, RouteQuery, Routing
from router.policies import PolicyContext, PolicyRequest
from router.pricing.cost import RequestShape
from router.pricing.load_view import LoadView

BLOCK_SIZE = 16
FINGERPRINT = Fingerprint(
    model_id="paper",
    revision="0",
    kv_dtype="float32",
    template_digest="",
    block_size=BLOCK_SIZE,
    hash_algorithm=HashAlgorithm.XXH3_128,
)
OTHER_FINGERPRINT = replace(FINGERPRINT, kv_dtype="bfloat16")
OTHER_MODEL = replace(FINGERPRINT, revision="1")
STEP_TIME = StepTimeModel(base_s=0.01, per_token_s=0.0001, per_attention_s=0.0, per_sequence_s=0.001)


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def replica_id(index: int) -> ReplicaId:
    return ReplicaId(f"r{index}")


def info(**changes: Any) -> ReplicaInfo:
    base = ReplicaInfo(
        fingerprint=FINGERPRINT,
        event_endpoint="tcp://127.0.0.1:1",
        snapshot_endpoint="tcp://127.0.0.1:2",
        num_blocks=10_000,
        max_model_len=100_000,
        max_batched_tokens=512,
        device="simulated",
        attention_backend="none",
    )
    return replace(base, **changes)


def config(**changes: Any) -> RouterConfig:
    base = RouterConfig(model_name="paper", tokenizer="paper", fingerprint=FINGERPRINT, seed=7)
    return replace(base, **changes)


def load(**changes: Any) -> Load:
    return Load(**{"free_blocks": 10_000, "total_blocks": 10_000, "step_time": STEP_TIME, **changes})


def told(
    *num_blocks: int, tenant: str = "", share: float = 1.0, had: float = 0.0, age_s: float = 0.0
) -> QueuedPrompts:
    """What a paper replica where prompts stand back tells of prompts like `query`'s, with nothing cached, all
    of that age."""
    tokens = [each * BLOCK_SIZE + 1 for each in sorted(num_blocks)]
    places = [STEP_TIME.prefill_s(each, 0, info().max_batched_tokens) - AGING * age_s for each in tokens]
    return QueuedPrompts(tenant, share, had, tuple(places), tuple(tokens))


def view(**changes: Any) -> LoadView:
    base = LoadView(
        backlog_s=0.0,
        num_requests=0,
        num_running=0,
        num_waiting=0,
        context_tokens=0,
        used_fraction=0.0,
        max_batched_tokens=512,
        step_time=STEP_TIME,
        is_full=False,
        is_draining=False,
        is_silent=False,
        last_chosen=0,
        queued_tokens=0,
        total_blocks=10_000,
        num_in_flight=0,
    )
    return base._replace(**changes)


def chain(name: str, num_blocks: int, parent: Sequence[BlockHash] = ()) -> list[BlockHash]:
    """A made-up prompt's block hashes: those of `parent`, then `num_blocks` of its own."""
    own = [hashlib.blake2b(f"{name}/{i}".encode(), digest_size=16).digest() for i in range(num_blocks)]
    return [*parent, *map(BlockHash, own)]


def hint_chain(name: str, num_blocks: int) -> list[HashHint]:
    return [HashHint(int.from_bytes(h[:8], "little")) for h in chain(name, num_blocks)]


def spread(count: int) -> list[HashHint]:
    """So many different hints, over all 64 bits."""
    return [HashHint(number * 0x9E3779B97F4A7C15 % 2**64) for number in range(1, count + 1)]


def context(*, seed: int = 0, clock: FakeClock | None = None) -> PolicyContext:
    return PolicyContext(BLOCK_SIZE, clock or FakeClock(), random.Random(seed))


def request(shape: RequestShape, name: str = "r") -> PolicyRequest:
    return PolicyRequest(RequestId(name), shape)


def query(name: str, num_blocks: int = 8, **changes: Any) -> RouteQuery:
    """A prompt of full blocks and one token more, so that all of its blocks are usable."""
    base = RouteQuery(RequestId(name), chain(name, num_blocks), num_blocks * BLOCK_SIZE + 1)
    return base._replace(**changes)


class _Decisions(SilentObserver):
    def __init__(self) -> None:
        self.records: list[DecisionRecord] = []

    def decided(self, record: DecisionRecord, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        self.records.append(record)


def decisions_of(routing: Routing) -> list[DecisionRecord]:
    """From now on, oldest first."""
    watcher = _Decisions()
    routing.watch(watcher)
    return watcher.records
