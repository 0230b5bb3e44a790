"""Where a request should go as things are: match -> cost -> pick.

Knows block hashes, load and replica names; books nothing (`booking.py`), and hears of nothing by itself
(`routing.py`). Owner: the router's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from cache.block_hash import hint_view as to_hints
from cache.types import HashHint, ReplicaId
from router.config import RouterConfig
from router.errors import AllBusy, NoReplica
from router.index.prefix_index import PrefixIndex
from router.placement.admission import RETRY_AFTER_RANGE_S
from router.placement.decision import NO_COPIES, Decision, HotCopy, RouteQuery
from router.placement.fleet import Fleet
from router.placement.inheritance import LEAST_COPIES, Inheritance, heir
from router.placement.passing import Passing
from router.placement.policy_set import PolicySet
from router.placement.ranking import Ranking, candidates_of, ranking_of
from router.placement.replica_queues import ReplicaQueues
from router.placement.shaper import Shaper, usable_tokens
from router.policies import Heir, Policy, PolicyRequest
from router.policies.expected_time import ExpectedTime
from router.pricing.cost import prefill_s
from router.pricing.fleet_load import FleetLoad
from router.pricing.fleet_queue import queue_of
from router.pricing.host_copies import with_copies
from router.pricing.replica_state import ReplicaState
from router.pricing.taken_share import free_part
from router.pricing.waiting import level_s, start_s

Match = Callable[[Sequence[HashHint], float], Mapping[ReplicaId, int]]

Ahead = Mapping[ReplicaId, float]
"""Seconds of each replica's time that those take who wait at the router for it, and go first."""

NOBODY: Ahead = {}


class Weighing:
    """Decides. What it is made of belongs to `Routing` and changes under it; it changes none of it, but that
    the shaper notes how many wait."""

    def __init__(
        self,
        config: RouterConfig,
        clock: Callable[[], float],
        *,
        match: Match,
        fleet: Fleet,
        loads: FleetLoad,
        index: PrefixIndex,
        policies: PolicySet,
        shaper: Shaper,
        inheritance: Inheritance,
        queues: ReplicaQueues,
        peers: Callable[[], tuple[int, int]],
    ) -> None:
        """match: leading blocks of a prompt that each replica holds, at a time by the clock; those that hold
        none, or are silent, left out. queues: what waits at each for its first token. peers: this router's
        place among the routers, and their number."""
        self._config = config
        self._clock = clock
        self._block_size = config.fingerprint.block_size
        self._match = match
        self._fleet = fleet
        self._loads = loads
        self._index = index
        self._policies = policies
        self._shaper = shaper
        self._inheritance = inheritance
        self._passing = Passing(queues)
        self._peers = peers
        self.num_held = 0  # requests that wait at this router: they count as queued
        self.makes_copies = False  # whether somebody computes the copies that decisions want

    def weigh(self, query: RouteQuery, *, earlier: Decision | None = None, ahead: Ahead = NOBODY) -> Decision:
        """Where the request should go as things are; books nothing. Raises as `choose` does.

        earlier: what was decided about the same query before, to save work. ahead: who waits before it.
        """
        now = self._clock()
        policy = self._policies.named(query.policy) if query.policy else self._policies.configured
        hints = to_hints(query.block_hashes) if earlier is None else earlier.request.hints
        held = self._match(hints, now)
        states = self._admissible(query, now)
        everybody = len(states) == len(self._loads)
        cached = self._cached(states, held, query.num_prompt_tokens)
        copy_s: Mapping[ReplicaId, float] = NO_COPIES
        pools = self._index.match_pools(hints)
        if pools:
            cached, copy_s = with_copies(states, cached, pools, block_size=self._block_size)
        if isinstance(policy, ExpectedTime):
            states = self._passing.met_by(query, hints, states, cached, now)
        states = _behind(states, ahead, now)
        if earlier is None and query.is_new:
            self._shaper.arrived(free_part(states, now))
        states = _behind(states, copy_s, now)
        is_settling = self._inheritance.is_open(now)
        shape = self._shaper.shape(
            hints,
            query.num_prompt_tokens,
            cached,
            self._loads.queue() if everybody else queue_of(states),
            self.num_held,
            now,
            least_copies=LEAST_COPIES if is_settling else 0,
        )
        its_heir = self._heir(hints, query.num_prompt_tokens, states, cached) if is_settling else None
        request = PolicyRequest(query.request_id, shape, hints, query.prompt, its_heir)
        ranking = self._rank(policy, states, cached, request, now)
        hot_copy = None
        if self._is_for_others(policy, ranking, request):
            alone = request._replace(shape=shape._replace(hot_share=1.0))
            soonest = self._rank(policy, states, cached, alone, now)
            if soonest.best_cached >= shape.hot_tokens:
                hot_copy = HotCopy(ranking.best.replica_id, shape.hot_tokens)
                request, ranking = alone, soonest
        available = shape.most_cached
        if not everybody:
            available = max(available, self._most_available(held, pools, query.num_prompt_tokens))
        price = ranking.best.price
        own_s = prefill_s(price, query.num_prompt_tokens, ranking.best_cached) if price is not None else 0.0
        return Decision(query, request, policy, ranking, available, own_s, copy_s, hot_copy)

    def free_replicas(self, within_s: float, within_steps: float = 0.0) -> tuple[int, list[ReplicaState]]:
        """As `Deciding.free_replicas`.

        Draining ones are neither, full ones may be chosen in time. O(replicas).
        """
        states, now = self._loads.states(), self._clock()
        num_open = sum([not state.load.is_draining for state in states])
        soon = [s for s in states if s.busy_until <= now + max(within_s, within_steps * s.decode_step_s)]
        return num_open, [s for s in soon if not (s.is_shut and s.is_shut_at(now))]

    def could_win(self, earlier: Decision, free: Sequence[ReplicaState], ahead: Ahead = NOBODY) -> bool:
        """Whether weighing it anew might choose one of these. O(these). ahead: as `weigh` is to have it.

        False is certain but for what time alone changes and what has become cached in the meantime: weigh
        anew now and then.
        """
        best_id, policy = earlier.ranking.best.replica_id, earlier.policy
        rivals = [state for state in free if state.replica_id not in earlier.query.excluded]
        if not rivals:
            return False
        if best_id not in self._loads or not isinstance(policy, ExpectedTime):
            return True
        best = self._loads[best_id].state()
        if best.is_shut or any([state.replica_id == best_id for state in rivals]):
            return True
        now = self._clock()
        states = [best, *rivals]
        cached = [earlier.ranking.cached_by(state.replica_id) for state in states]
        states = self._passing.met_by(earlier.query, earlier.request.hints, states, cached, now)
        states = _behind(_behind(states, ahead, now), earlier.copy_s, now)
        return policy.is_beaten(states, cached, earlier.request, now)

    def wait_s(self, held_s: float = 0.0) -> float:
        """Seconds until the fleet could start on a newcomer, when so much work held here goes before it.

        0 when none is there. O(replicas), and sorting them.
        """
        now = self._clock()
        states = [s for s in self._loads.states() if not s.load.is_draining]
        # What a silent one has queued is not known to get shorter.
        states = [s for s in states if now <= s.silent_at] or states
        residence, most = self._loads.residence, self._config.max_wait_s or 0.0
        starts = [start_s(s, now, residence, max_wait_s=most) for s in states]
        # Requests come to the routers alike: the others hold about as much.
        return level_s(starts, held_s * self._peers()[1])

    def share_s(self, held_s: float) -> float:
        """As `Routing.share_s`."""
        return held_s * self._peers()[1] / max(1, len(self._loads))

    def rerank(
        self,
        policy: Policy,
        request: PolicyRequest,
        excluded: frozenset[ReplicaId],
        candidates: Sequence[ReplicaId],
    ) -> list[ReplicaId]:
        """Order these replicas for a request that was decided before.

        Excluded ones are left out; draining and full ones come last, unknown ones behind them.
        """
        now = self._clock()
        wanted = [replica_id for replica_id in candidates if replica_id not in excluded]
        held = self._match(request.hints, now)
        known = [state for state in self._loads.states() if state.replica_id in wanted]
        open_ = [s for s in known if not (s.load.is_draining or s.is_full(now))]
        shut = [s for s in known if s.load.is_draining or s.is_full(now)]
        ranks: list[ReplicaId] = []
        if open_:
            num_tokens = request.shape.num_prompt_tokens
            cached = self._cached(open_, held, num_tokens)
            if self._inheritance.is_open(now):  # perhaps since it was decided
                request = request._replace(heir=self._heir(request.hints, num_tokens, open_, cached))
            ranks += self._rank(policy, open_, cached, request, now).replica_ids(len(open_))
        shut.sort(key=lambda state: (state.load.is_draining, state.num_requests_at(now)))
        ranks += [state.replica_id for state in shut]
        placed = set(ranks)
        return ranks + [replica_id for replica_id in wanted if replica_id not in placed]

    # --- the steps of `weigh` ------------------------------------------------------------------

    def _admissible(self, query: RouteQuery, now: float) -> list[ReplicaState]:
        """Those that are alive, not draining and have room. Raises NoReplica or AllBusy."""
        if self._fleet.silent or query.excluded:
            states = [s for s in self._loads.states() if s.replica_id not in query.excluded]
            states = [s for s in states if not (s.load.is_draining or s.is_full(now))]
        else:
            states = self._loads.open_states()
        if not states:
            self._turn_away(self._loads.states(), query, now)
        length = query.num_prompt_tokens + query.max_tokens
        if length > self._fleet.least_model_len:
            # While limits differ between replicas; where nobody's fits, the replica says so with its numbers.
            return [state for state in states if state.info.max_model_len >= length] or states
        return states

    def _turn_away(self, known: Sequence[ReplicaState], query: RouteQuery, now: float) -> NoReturn:
        alive = [s for s in known if not (s.load.is_draining or s.replica_id in query.excluded)]
        if not alive:
            raise NoReplica(len(known), len(query.excluded & self._fleet.members.keys()))
        least, most = RETRY_AFTER_RANGE_S
        backlog_s = min(state.backlog_s(now) for state in alive)
        raise AllBusy(len(alive), retry_after_s=min(max(backlog_s, least), most))

    def _cached(
        self, states: Sequence[ReplicaState], held: Mapping[ReplicaId, int], num_prompt_tokens: int
    ) -> list[int]:
        """Usable tokens of the prompt each of these holds."""
        size = self._block_size
        usable = max(0, (num_prompt_tokens - 1) // size) * size
        if len(states) < len(self._loads):
            return [min(held.get(state.replica_id, 0) * size, usable) for state in states]
        # Mostly nearly all hold as much, a system prompt or nothing: to look up each takes thrice this.
        least = min(held.values()) if len(held) == len(states) else 0
        cached = [min(least * size, usable)] * len(states)
        place_of = self._loads.places()
        for name, overlap in held.items():
            if overlap != least:
                cached[place_of[name]] = min(overlap * size, usable)
        return cached

    def _heir(
        self,
        hints: Sequence[HashHint],
        num_prompt_tokens: int,
        states: Sequence[ReplicaState],
        cached: Sequence[int],
    ) -> Heir | None:
        """Of what the prompt shares with others; None if several hold that, or there is nothing."""
        found = self._shaper.shared_prefix(hints, num_prompt_tokens)
        if found is None:
            return None
        last, tokens = found
        holders = [s.replica_id for s, held in zip(states, cached, strict=True) if held >= tokens]
        if holders:
            return Heir(holders[0], last, tokens) if len(holders) == 1 else None
        readable = [s.replica_id for s in states if s.replica_id in self._index]
        return Heir(heir(last, readable), last, tokens) if readable else None

    def _most_available(
        self, held: Mapping[ReplicaId, int], pools: Mapping[ReplicaId, int], num_prompt_tokens: int
    ) -> int:
        """Usable tokens of the prompt that some replica's pool holds, also one that may not be chosen now."""
        most_held = max([pools.get(name, held[name]) for name in held], default=0)
        return usable_tokens(most_held, num_prompt_tokens, self._block_size)

    def _is_for_others(self, policy: Policy, ranking: Ranking, request: PolicyRequest) -> bool:
        """Whether it would go where it computes a hot prefix again, at a price that later requests bear."""
        shape = request.shape
        return (
            self.makes_copies
            and isinstance(policy, ExpectedTime)
            and policy.options.copies_beside
            and ranking.best_cached < shape.hot_tokens
            and shape.hot_share < 1.0
            and ranking.is_best_matched
        )

    def _rank(
        self,
        policy: Policy,
        states: Sequence[ReplicaState],
        cached: Sequence[int],
        request: PolicyRequest,
        now: float,
    ) -> Ranking:
        unmatched = self._fleet.blind
        if isinstance(policy, ExpectedTime):
            order, costs = policy.order(states, cached, request, now)
            return Ranking(states, cached, costs, order, unmatched, now)
        scored = policy.rank(candidates_of(states, cached, unmatched, now), request)
        return ranking_of(scored, states, cached, unmatched, now)


def _behind(states: list[ReplicaState], ahead: Ahead, now: float) -> list[ReplicaState]:
    """The states with so much more before the request that is weighed: who waits for them here, or copies."""
    if not ahead:
        return states
    seconds = ahead.get
    return [state.behind(s, now) if (s := seconds(state.replica_id)) else state for state in states]
