"""Late binding: requests that wait at the router until the best replica for them has nearly caught up.

    submit ──> held, in order ──(its best replica's backlog is short)──> placed
                  └──(deadline passed, no replica left)──> refused        └──(client gone) withdraw

A request sent at once waits in one replica's queue, behind whatever else is there, and stays there when
another replica falls idle. Held here, the decision is taken when it can be acted on, with the caches and the
load of that moment; and short work goes first, which lowers the mean wait of all. The order is

    own prefill seconds - aging * seconds waited,       least first

where nobody who has waited `age_floor_s` stands behind somebody who has not: those go first, oldest first. A
request of priority p counts as one that came later by its seconds (`cache/priority.py`), for both. That is
the order of one tenant's; between tenants it goes by what they have had (`held_queue.py`), and who would wait
too long is judged by its tenant's own part of the queue.
For the first `window` in that order the decision is taken (`Routing.weigh`), with those that wait before it
for the same replica counted as that replica's backlog; whoever's best replica would start on it soon leaves,
booked. The others keep their place and are bound to nothing. A whole window may wait for the one replica that
holds a hot prefix: behind it, it is the turn of whoever wants a free replica that nobody before waits for,
and what the rest want is looked at anew from time to time. How soon follows from the order, too:

    2 * backlog_s * exp(-order / mean own prefill)        a request of mean length: 0.74 * backlog_s

    backlog_s = max_backlog_s, or four steps of the replica's without a prompt, if that is longer

so that the order holds between routers that do not know each other's requests: whoever holds the shorter one
may send it earlier, and the others hear of it from the replica before their own turn has come. Where many
sequences decode, a step takes long whatever prompts are in it: it is to find enough of them.
This is also the router's bounded queue: who may wait in it, and who no longer, is said in `entrance.py`.

Pure and clock-driven: it neither waits nor calls back. Whoever drives it (an event loop, a simulation) calls
`poll` after every `submit` and after everything that may free a replica, and again at `next_poll_at`.
Knows requests, seconds and `Routing`; knows neither tasks nor sockets. Owner: the router's event loop.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence, Set

from cache.errors import DeadlineExceeded, ServingError
from cache.types import HashHint, ReplicaId, RequestId
from router.errors import AllBusy, NoReplica
from router.placement.admission import Admission, QueueState
from router.placement.deciding import Deciding
from router.placement.decision import Decision, RouteQuery
from router.placement.entrance import Entrance
from router.placement.held_queue import HeldQueue
from router.placement.held_request import Departure, HeldRequest
from router.placement.hold_options import AGED, HoldOptions
from router.placement.replica_queue import LAST
from router.placement.tenant_demand import TenantDemand
from router.placement.weighing import NOBODY, Ahead
from router.pricing.replica_state import ReplicaState

ROUNDING_S = 1e-6  # of sums of times: who was told to come back now is not sent away again
RELOOK_S = 0.1  # what nobody reports, such as what has become cached, is noticed after this at the latest
# Behind the window so many are weighed anew at a time, and so often: hundreds a second, and never a stall.
LOOKS_BEHIND = 4
LOOK_BEHIND_S = 0.02
FRESH_S = 0.001  # a decision no older than this need not be taken again
EARLIEST = 2.0  # times a short backlog: the one behind which the very first in the order is sent
# Where all that are left are leaving, others are about to come: a rolling update stops the last old one when
# new ones are ready, and is heard of from that one first. So long a request waits for them; one that was
# handed over waits also where nobody else is listed, since whoever had it may be off the list already.
SUCCESSION_S = 5.0
MEAN_OVER = 32  # requests, about, that the mean own prefill goes back


class HeldRequests:
    """The requests one router holds back."""

    def __init__(self, routing: Deciding, options: HoldOptions, clock: Callable[[], float]) -> None:
        self._routing = routing
        self._options = options
        self._clock = clock
        self._admission = Admission(options.max_wait_s, clock, overload_wait_s=options.overload_wait_s)
        self._numbers = itertools.count()
        self._queue = HeldQueue()
        self._demand = TenantDemand()
        self._entrance = Entrance(routing, options, self._admission, self._demand, self._queue)
        self._queues = routing.queues
        self._mean_prefill_s = 0.0  # of those that came lately; 0 while nobody has, or speeds are unknown
        self._num_counted = 0  # of them, up to `MEAN_OVER`
        self._known_free: dict[ReplicaId, ReplicaState] = {}  # at the last poll
        self._looked_behind_at = -math.inf  # the window
        # When the first of those that wait for successors is to be told that none has come: also where
        # replicas that may not take it are busy, which alone are no reason to look.
        self._forsaken_until = math.inf

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._queue

    @property
    def engine_s(self) -> float:
        """Seconds of replicas' time that those who are held will take; what is unknown counts as 0."""
        return self._queue.engine_s

    @property
    def refused_ratio(self) -> float:
        """Of those seconds, how many were refused lately for each that was placed."""
        return self._admission.refused_ratio

    def queue_state(self) -> QueueState:
        """O(replicas)."""
        return self._admission.state(self._routing.wait_s(self.engine_s))

    def submit(self, query: RouteQuery, *, since: float | None = None, deadline: float | None = None) -> None:
        """Hold a request; the next `poll` may let it go at once.

        since: when it began to wait, by the clock, if that was earlier (another attempt at it); None = now.
        deadline: when it is to be given up, by the clock. Raises AllBusy when it would wait too long or too
        many are held, NoReplica when nobody could ever take it, and ConfigError for an unknown policy; then
        it is not held.
        Raises ValueError for a request that is held already.
        """
        if query.request_id in self._queue:
            raise ValueError(f"request {query.request_id!r} is held already")
        now = self._clock()
        held = HeldRequest(
            query,
            since=now if since is None else min(since, now),
            number=next(self._numbers),
            deadline=float("inf") if deadline is None else deadline,
            order=0.0,
        )
        held.order = self._options.aging * (held.since + held.lag_s)  # while its own prefill is unknown
        try:
            self._take_in(held, now)
        except (AllBusy, NoReplica) as error:
            self._routing.note_refused(error)
            raise
        self._enter(held)

    def withdraw(self, request_id: RequestId) -> bool:
        """Its caller has gone. False if it is not held (any more)."""
        held = self._queue.get(request_id)
        if held is None:
            return False
        self._leave(held)
        return True

    def served(self, tenant: str, num_tokens: int, share: float) -> None:
        """So many tokens were generated for it: they count as its prompts' do."""
        now = self._clock()
        self._queue.charge(tenant, num_tokens, share)
        self._demand.came(tenant, num_tokens, share, now)
        self._demand.placed(num_tokens, now)

    def not_taken(self, engine_s: float) -> None:
        """`Admission.not_taken`."""
        self._admission.not_taken(engine_s)

    def given_up(self, engine_s: float) -> None:
        """`Admission.given_up`."""
        self._admission.given_up(engine_s)

    def poll(self) -> list[Departure]:
        """Who leaves now, in the order of their decisions; each request leaves exactly once.

        The placements are booked already. O(replicas) while no replica is free and one tenant asks, else up
        to `window` decisions beside those acted on, one more for each free replica, and `LOOKS_BEHIND`.
        """
        now = self._clock()
        departures = self._overdue(now) + self._too_late(now)
        if self._queue:
            within_s = EARLIEST * self._options.max_backlog_s + ROUNDING_S
            within_steps = EARLIEST * self._options.max_backlog_steps + ROUNDING_S
            num_replicas, free = self._routing.free_replicas(within_s, within_steps)
            news = [state for state in free if state is not self._known_free.get(state.replica_id)]
            self._known_free = {state.replica_id: state for state in free}
            is_given_up = self._forsaken_until <= now
            if is_given_up:
                self._forsaken_until = math.inf  # whoever waits on says so again
            if free or not num_replicas or is_given_up or self._has_due(now):
                departures += self._let_go(now, num_replicas, free, news)
        return departures

    def next_poll_at(self) -> float | None:
        """When to poll again if nothing happens before; None: nobody is held."""
        if not self._queue:
            return None
        now = self._clock()
        wake_at = now + RELOOK_S
        for held in self._window(now):
            if held.free_at > now:
                wake_at = min(wake_at, held.free_at)
        if (first := self._queue.next_deadline) is not None:
            wake_at = min(wake_at, first.deadline)
        return wake_at

    # --- taking in ----------------------------------------------------------------------------

    def _take_in(self, held: HeldRequest, now: float) -> None:
        """Raises why it is not."""
        num_replicas, _ = self._routing.free_replicas(0.0)
        if held.query.has_to_be_admitted:
            self._entrance.check_places(held, num_replicas)
        try:
            self._weigh(held, now)
        except AllBusy:
            pass  # nobody has room now: that is what waiting here is for
        except NoReplica as error:
            if not self._may_wait_for_successors(held, error, now):
                raise
        if held.query.is_new:
            self._entrance.check_wait(held, now, num_replicas)
        held.query.admit()

    def _too_late(self, now: float) -> list[Departure]:
        if not self._admission.is_overload:
            return []
        departures = []
        for held, error in self._entrance.too_late(now):
            self._leave(held)
            self._routing.note_refused(error)
            departures.append(Departure(held.request_id, now - held.since, error=error))
        return departures

    # --- deciding -----------------------------------------------------------------------------

    def _let_go(
        self, now: float, num_replicas: int, free: Sequence[ReplicaState], news: Sequence[ReplicaState]
    ) -> list[Departure]:
        """Decide for those whose turn it is; a place that falls free in the window goes to the next.

        num_replicas: that may be chosen; if there is none, those that wait have to be told. free: of them,
        those that are. news: of these, those that were not at the last poll or have said something since.
        """
        departures: list[Departure] = []
        ahead: dict[ReplicaId, float] = {}  # of each replica's time: those that stay, and go before the next
        inherited: set[HashHint] = set()  # shared prefixes that these compute at their heirs
        unclaimed = {state.replica_id for state in free}  # nobody that stays waits for them
        for held in self._turns(now, unclaimed):
            departure = None
            try:
                if not (num_replicas and self._is_bound_to_stay(held, free, news, ahead, now)):
                    departure = self._decide(held, now, () if departures else free, ahead)
            except Exception as error:
                # A bug that one request meets, in a policy say, ends that one, and no other's wait.
                departure = Departure(held.request_id, now - held.since, error=error)
            if departure is not None:
                self._leave(held)
                departures.append(departure)
                continue
            if held.wants is not None:
                unclaimed.discard(held.wants)
                ahead[held.wants] = ahead.get(held.wants, 0.0) + _time_taken_s(held, inherited)
        return departures

    def _turns(self, now: float, unclaimed: Set[ReplicaId]) -> Iterator[HeldRequest]:
        """In order, until `window` of them have stayed; behind it who wants, or may want, one of `unclaimed`.

        Those it has given out may leave meanwhile, and whoever stays takes what it wants out of `unclaimed`.
        """
        num_stayed = 0
        in_turn = self._in_turn(now)
        for held in in_turn:
            yield held
            if held.request_id in self._queue:
                num_stayed += 1
                if num_stayed == self._options.window:
                    break
        if not unclaimed:
            return
        behind = list(in_turn)
        looked_at = self._looked_at(behind, now)
        for held in behind:
            if not unclaimed:
                return
            if held.wants in unclaimed or held in looked_at:
                yield held

    def _looked_at(self, behind: list[HeldRequest], now: float) -> Set[HeldRequest]:
        """Who behind the window is weighed anew, as it may want another replica by now: a few, in turns."""
        if now < self._looked_behind_at + LOOK_BEHIND_S - ROUNDING_S:
            return frozenset()
        self._looked_behind_at = now
        return set(heapq.nsmallest(LOOKS_BEHIND, behind, key=lambda held: held.weighed_at))

    def _is_bound_to_stay(
        self,
        held: HeldRequest,
        free: Sequence[ReplicaState],
        news: Sequence[ReplicaState],
        ahead: Ahead,
        now: float,
    ) -> bool:
        """Nothing that was reported since it was weighed last can have changed that it waits.

        Reports come by the thousand a second: this answers most of them.
        """
        decision = held.decision
        if decision is None or held.wants is None or now >= held.weighed_at + RELOOK_S:
            return False
        longer_s = ahead.get(held.wants, 0.0) - held.ahead_s
        if held.free_at + longer_s <= now + ROUNDING_S:
            return False
        # More of its own replica's time is spoken for than when it was weighed: any free one may be better.
        rivals = free if longer_s > ROUNDING_S else news
        if rivals and self._routing.could_win(decision, rivals, ahead):
            return False
        held.ahead_s += longer_s
        held.free_at += longer_s
        return True

    def _decide(
        self, held: HeldRequest, now: float, free: Sequence[ReplicaState], ahead: Ahead
    ) -> Departure | None:
        """None: it stays. free: replicas that are, and for which nothing was booked in this poll."""
        request_id, waited_s = held.request_id, now - held.since
        decision = held.decision
        is_fresh = now <= held.weighed_at + FRESH_S and held.wants is not None and held.wants not in ahead
        # A newcomer's decision, of a moment ago: acted on if its replica has said nothing else since.
        if decision is None or not is_fresh or all(state is not decision.ranking.best for state in free):
            try:
                decision = self._weigh(held, now, ahead)
            except AllBusy:
                held.wants, held.free_at = None, float("inf")  # room is reported, it does not come with time
                held.forsaken_at = math.inf
                return None
            except ServingError as error:
                if isinstance(error, NoReplica):
                    if self._may_wait_for_successors(held, error, now):
                        held.wants, held.free_at = None, float("inf")
                        return None
                    self._routing.note_refused(error)
                return Departure(request_id, waited_s, error=error)
        if held.free_at > now + ROUNDING_S:
            return None
        self._queue.charge(held.tenant, held.uncached_tokens, held.query.share)
        self._demand.placed(held.uncached_tokens, now)
        self._admission.placed(decision.engine_s)
        held.query.begin()
        return Departure(request_id, waited_s, self._routing.book(decision))

    def _may_wait_for_successors(self, held: HeldRequest, error: NoReplica, now: float) -> bool:
        """Nobody can take it, because those who could are leaving, and not for long yet."""
        if error.num_known <= error.num_excluded and not held.query.is_handed_over:
            return False
        held.forsaken_at = min(held.forsaken_at, now)
        until = held.forsaken_at + SUCCESSION_S
        if now >= until:
            return False
        self._forsaken_until = min(self._forsaken_until, until)
        return True

    def _weigh(self, held: HeldRequest, now: float, ahead: Ahead = NOBODY) -> Decision:
        decision = self._routing.weigh(held.query, earlier=held.decision, ahead=ahead)
        held.forsaken_at = math.inf
        if held.decision is None:
            self._count(decision.prefill_s)
        held.decision, held.weighed_at = decision, now
        held.wants = decision.ranking.best.replica_id
        held.ahead_s = ahead.get(held.wants, 0.0)
        self._queue.reprice(
            held,
            engine_s=decision.engine_s,
            order=decision.prefill_s + self._options.aging * (held.since + held.lag_s),
        )
        # What it copies first itself is work before it on an idle replica, too: it need not wait for that.
        backlog_s = decision.start_s - held.ahead_s - decision.copy_s.get(held.wants, 0.0)
        if backlog_s > 0.0:
            backlog_s = self._before_s(held, decision, backlog_s, now)
        held.free_at = now + held.ahead_s + backlog_s - self._soon_s(held, decision.ranking.best, now)
        return decision

    def _before_s(self, held: HeldRequest, decision: Decision, backlog_s: float, now: float) -> float:
        """Of its replica's backlog, as much as it waits for there."""
        part = self._part_before(held, decision, now)
        part_s = self._queues.before_s(decision.ranking.best.replica_id, part, now + backlog_s, now)
        # Whoever goes first waits, too, while nobody is started there: it is late, or short of blocks.
        return min(backlog_s, max(part_s, decision.ranking.best.first_at - now))

    def _part_before(self, held: HeldRequest, decision: Decision, now: float) -> float:
        """Of what its replica has queued, as much as goes before it: what others have there, or what is
        longer, may stand back for it."""
        best, query = decision.ranking.best, held.query
        place = LAST
        # Without a place there it would wait for one, which nobody gives up; and while nobody knows how fast
        # it is, it takes first come.
        if best.price is not None and best.num_requests < best.info.max_running:
            hints, cached = decision.request.hints, decision.ranking.best_cached
            place = max(
                self._queues.place(best.replica_id, query, decision.prefill_s, now),
                self._queues.promised_place(query, hints, best.replica_id, cached),
            )
        return self._queues.before(
            best.replica_id, query.tenant, held.uncached_tokens, query.share, place, self._queue.ahead
        )

    def _has_due(self, now: float) -> bool:
        """Whether somebody may leave though no replica is free: what keeps it busy would stand back."""
        if not self._queues.may_stand_back(self._queue.tenants):
            return False
        return any([held.wants and held.free_at <= now + ROUNDING_S for held in self._window(now)])

    def _soon_s(self, held: HeldRequest, replica: ReplicaState, now: float) -> float:
        """Behind so much backlog it is sent there: more for who comes before, so that the order is kept."""
        steps_s = self._options.max_backlog_steps * replica.decode_step_s
        most_s = EARLIEST * max(self._options.max_backlog_s, steps_s)
        order_s = held.order - self._options.aging * now
        has_aged = now - held.since - held.lag_s >= self._age_floor_s
        if order_s <= 0 or not self._mean_prefill_s or has_aged:
            return most_s
        return most_s * math.exp(-order_s / self._mean_prefill_s)

    def _count(self, prefill_s: float) -> None:
        """One more request came."""
        self._num_counted = min(self._num_counted + 1, MEAN_OVER)
        self._mean_prefill_s += (prefill_s - self._mean_prefill_s) / self._num_counted

    # --- the queue ----------------------------------------------------------------------------

    def _window(self, now: float) -> Iterator[HeldRequest]:
        return itertools.islice(self._in_turn(now), self._options.window)

    def _in_turn(self, now: float) -> Iterator[HeldRequest]:
        return self._queue.in_turn(now - self._age_floor_s)

    @property
    def _age_floor_s(self) -> float:
        """In overload work has to be old sooner."""
        return min(self._options.age_floor_s, AGED * self._admission.bound_s)

    def _enter(self, held: HeldRequest) -> None:
        self._queue.add(held)
        self._routing.note_held(len(self._queue))

    def _leave(self, held: HeldRequest) -> None:
        self._queue.remove(held)
        self._routing.note_held(len(self._queue))

    def _overdue(self, now: float) -> list[Departure]:
        departures = []
        while (held := self._queue.next_deadline) is not None and held.deadline <= now:
            self._leave(held)
            waited_s = now - held.since
            error = DeadlineExceeded(held.deadline - held.since, waited_s)
            departures.append(Departure(held.request_id, waited_s, error=error))
        return departures


def _time_taken_s(held: HeldRequest, inherited: set[HashHint]) -> float:
    """Seconds of its replica's time that those behind it wait for. inherited: shared prefixes that are
    computed before it at their heirs; its own is added.

    Twins stay together behind their heir. Were each to take as long as if it stood there alone, whoever comes
    next would go elsewhere, and at each Router another one.
    """
    decision = held.decision
    its_heir = decision.request.heir if decision is not None else None
    if decision is None or its_heir is None or held.wants != its_heir.replica_id:
        return held.engine_s
    if its_heir.prefix in inherited:
        return decision.twin_engine_s
    inherited.add(its_heir.prefix)
    return held.engine_s
