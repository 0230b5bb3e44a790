"""One simulated router: production's `Routing`, and the calls around it that the ingress makes.

Every router hears every replica, an event's delay later, and knows of the other routers' requests only what
the replicas say. Knows placement and its calls; knows neither steps nor caches.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cache.events import EventBatch, Load
from cache.messages import ReplicaInfo
from cache.types import ReplicaId, RequestId
from loadtest.simulation.clock import EventQueue
from loadtest.simulation.turns import Turn, copy_turn, fingerprint
from router.config import RouterConfig
from router.errors import AllBusy, NoReplica
from router.placement.admission import Admission
from router.placement.decision import Placement
from router.placement.held import HeldRequests
from router.placement.hold_options import HoldOptions
from router.placement.placing import PromptPlacer
from router.placement.routing import RouteQuery, Routing

NO_REPLICA_RETRY_S = 1.0  # after which a client asks again when nobody is there


class Dispatch(Protocol):
    def __call__(self, router: RouterNode, turn: Turn, num_output: int, replica_id: ReplicaId) -> None:
        """The router sends the request there."""


@dataclass(frozen=True, slots=True)
class _Held:
    turn: Turn
    num_output: int


class RouterNode:
    def __init__(
        self,
        *,
        policy: str,
        policy_options: Mapping[str, object],
        router_options: Mapping[str, Any],
        peers: tuple[int, int],
        block_tokens: int,
        queue: EventQueue,
        rng: random.Random,
        dispatch: Dispatch,
    ) -> None:
        """peers: its place among the routers, and their number. Raises ConfigError for an unknown policy
        or option."""
        config = RouterConfig(
            model_name="simulated",
            tokenizer="simulated",
            fingerprint=fingerprint(block_tokens),
            policy=policy,
            policy_options=policy_options,
            # Measured is the time to first token of all requests: nobody is refused unless that is asked for.
            **{"max_wait_s": None, **router_options},
        )
        self.routing = Routing(config, clock=queue, rng=rng, peers=lambda: peers)
        self.routing.make_copies(self._copy)
        self._placer: HeldRequests | PromptPlacer
        if config.binding == "late":
            self._placer = HeldRequests(self.routing, HoldOptions.of(config), queue)
        else:
            self._placer = PromptPlacer(self.routing, Admission.of(config, queue), queue)
        self._waiting: dict[RequestId, _Held] = {}
        self._poll_at = float("inf")  # the earliest poll that is scheduled
        self._block_tokens = block_tokens
        self._queue = queue
        self._dispatch = dispatch

    def submit(
        self, turn: Turn, *, num_output: int = 0, excluded: frozenset[ReplicaId] = frozenset()
    ) -> None:
        """Place a request, now or when there is room. num_output: tokens of its answer that are there."""
        tokens = turn.work.input_tokens + num_output
        query = RouteQuery(
            request_id=turn.request_id,
            block_hashes=turn.block_hashes[: tokens // self._block_tokens],
            num_prompt_tokens=tokens,
            excluded=excluded,
            max_tokens=turn.work.output_tokens - num_output,
            prompt=turn.prompt,
            asked_at=turn.work.arrival_s,
            is_again=bool(excluded),
        )
        try:
            if isinstance(self._placer, HeldRequests):
                self._placer.submit(query, since=turn.work.arrival_s)
                self._waiting[turn.request_id] = _Held(turn, num_output)
            else:
                placement = self._placer.place_now(query)
                self._dispatch(self, turn, num_output, placement.replica_id)
        except AllBusy as error:
            self._again(error.retry_after_s, turn, num_output, excluded)
        except NoReplica:
            self._again(NO_REPLICA_RETRY_S, turn, num_output, frozenset())
        self._poll()

    def accepted(self, request_id: RequestId, replica_id: ReplicaId) -> None:
        self.routing.routed(request_id, replica_id)

    def first_token(self, turn: Turn, replica_id: ReplicaId, cached_tokens: int) -> None:
        self.routing.first_token(turn.request_id, replica_id, cached_tokens)

    def finished(self, turn: Turn) -> None:
        if turn.is_copy:
            self.copy_over(turn)
            return
        self.routing.finish(
            turn.request_id, block_hashes=turn.block_hashes, answers=(turn.work.output_tokens,)
        )
        self._poll()

    def copy_over(self, turn: Turn) -> None:
        """It was made, or its replica has died: it is not asked for again."""
        self.routing.release(turn.request_id)
        self._poll()

    def heard(self, replica_id: ReplicaId, batch: EventBatch) -> None:
        self.routing.on_events(replica_id, batch)
        self._poll()

    def heard_load(self, replica_id: ReplicaId, load: Load) -> None:
        self.routing.on_load(replica_id, load)
        self._poll()

    def members(self, replicas: Mapping[ReplicaId, ReplicaInfo]) -> None:
        self.routing.update_replicas(replicas)
        self._poll()

    def lost(self, replica_id: ReplicaId) -> None:
        self.routing.replica_lost(replica_id)
        self._poll()

    def _copy(self, query: RouteQuery, placement: Placement) -> None:
        turn = copy_turn(query.request_id, query.num_prompt_tokens, query.block_hashes, self._queue.now)
        self._dispatch(self, turn, 0, placement.replica_id)

    def _poll(self) -> None:
        """Let go of whoever may leave; come back when somebody else may."""
        if not isinstance(self._placer, HeldRequests) or not len(self._placer):
            return
        for departure in self._placer.poll():
            held = self._waiting.pop(departure.request_id)
            if departure.placement is not None:
                self._dispatch(self, held.turn, held.num_output, departure.placement.replica_id)
            elif isinstance(departure.error, AllBusy):  # let in before it was known to be overload
                self._again(departure.error.retry_after_s, held.turn, held.num_output, frozenset())
            elif isinstance(departure.error, NoReplica):
                self._again(NO_REPLICA_RETRY_S, held.turn, held.num_output, frozenset())
            else:
                raise AssertionError("a decision failed") from departure.error
        poll_at = self._placer.next_poll_at()
        if poll_at is not None and poll_at < self._poll_at:
            self._poll_at = poll_at
            self._queue.at(poll_at, self._poll_then, poll_at)

    def _poll_then(self, poll_at: float) -> None:
        if poll_at == self._poll_at:
            self._poll_at = float("inf")
            self._poll()

    def _again(self, after_s: float, turn: Turn, num_output: int, excluded: frozenset[ReplicaId]) -> None:
        def submit() -> None:
            self.submit(turn, num_output=num_output, excluded=excluded)

        self._queue.at(self._queue.now + after_s, submit)
