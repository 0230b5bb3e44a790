"""A Router that holds requests back, before one engine, both under one virtual clock.

The Router's own queue (late binding, the shipped settings) and the engine of `virtual_engine.py`, whose load
is told after every step. Requests have lengths and tenants, and share nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from benchmarks.schedule.virtual_engine import Job, Outcome, VirtualEngine
from cache.events import StepTimeModel
from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.messages import ReplicaInfo
from cache.types import ReplicaId, RequestId
from router.config import RouterConfig
from router.errors import AllBusy
from router.placement.decision import RouteQuery
from router.placement.held import HeldRequests
from router.placement.hold_options import HoldOptions
from router.placement.routing import Routing

REPLICA = ReplicaId("replica")


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def run_routed(
    jobs: Sequence[Job], model: StepTimeModel, *, num_blocks: int, until_s: float = math.inf
) -> Outcome:
    """As `virtual_engine.run`, with each job held at the Router until its turn there."""
    engine, clock = VirtualEngine(jobs, model, num_blocks=num_blocks), _Clock()
    mark = Fingerprint("virtual", "", "virtual", "", engine.block_size, HashAlgorithm.XXH3_128)
    config = RouterConfig(model_name="virtual", tokenizer="virtual", fingerprint=mark, binding="late", seed=1)
    routing = Routing(config, clock=clock)
    info = ReplicaInfo(
        mark,
        event_endpoint="",
        snapshot_endpoint="",
        num_blocks=num_blocks,
        max_model_len=1 << 20,
        max_batched_tokens=engine.max_batched_tokens,
        device="virtual",
        attention_backend="none",
        has_prefix_cache=False,
        scheduling_order=engine.scheduling_order,
    )
    routing.update_replicas({REPLICA: info})
    held = HeldRequests(routing, HoldOptions.of(config), clock)
    index = 0

    def at(time_s: float) -> None:
        clock.now_s = max(clock.now_s, time_s)
        for departure in held.poll():
            if departure.placement is not None:
                routing.routed(departure.request_id, REPLICA)
                engine.submit(int(departure.request_id))

    routing.on_load(REPLICA, engine.load())
    while engine.now_s < until_s and (index < len(jobs) or len(held) or engine.has_work):
        if engine.has_work:
            ended = engine.step()
            for number in engine.answered:
                routing.first_token(RequestId(str(number)), REPLICA, 0)
            for number in ended:
                held.served(jobs[number].tenant, jobs[number].num_output_tokens, 1.0)
                routing.finish(RequestId(str(number)))
        else:  # nothing happens until somebody comes, or the Router looks again
            looks_at, comes_at = held.next_poll_at(), jobs[index].arrival_s if index < len(jobs) else math.inf
            engine.now_s = max(engine.now_s, min(comes_at, math.inf if looks_at is None else looks_at))
        while index < len(jobs) and jobs[index].arrival_s <= engine.now_s:
            job = jobs[index]
            clock.now_s = max(clock.now_s, job.arrival_s)
            with contextlib.suppress(AllBusy):
                held.submit(
                    RouteQuery(
                        RequestId(str(index)),
                        (),
                        job.num_prompt_tokens,
                        max_tokens=job.num_output_tokens,
                        tenant=job.tenant,
                    )
                )
            at(job.arrival_s)
            index += 1
        clock.now_s = max(clock.now_s, engine.now_s)
        routing.on_load(REPLICA, engine.load())
        at(engine.now_s)
    return engine.outcome()
