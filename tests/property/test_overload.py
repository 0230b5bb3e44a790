"""Laws of telling overload from what passes: batches and so many clients never are, too many requests always.

The queue here is a number: so many are served a second, and whoever waits is counted.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from router.placement.overload import FEW, GROWTH, YOUNG, Overload

LONG_WAIT_S, MAX_WAIT_S, QUIET_S = 0.5, 10.0, 40.0
RATES = st.floats(5.0, 100.0)


@dataclass
class Queue:
    """One server that takes 1 / rate_per_s for each, first come first served."""

    rate_per_s: float
    free_at: float = 0.0

    def __post_init__(self) -> None:
        self.overload = Overload(MAX_WAIT_S, QUIET_S)
        self.num_replicas = 4
        self.waiting: deque[tuple[float, float]] = deque()  # until when, and which part of a request
        self.num_waiting = 0.0

    def came(self, now: float, part: float = 1.0) -> bool:
        """Somebody comes and is taken in; whether that is overload."""
        wait_s = max(0.0, self.free_at - now)
        while self.waiting and self.waiting[0][0] <= now:
            self.num_waiting -= self.waiting.popleft()[1]
        num_waiting = self.num_waiting if self.waiting else 0.0  # and not what rounding has left
        self.free_at = max(now, self.free_at) + 1 / self.rate_per_s
        self.waiting.append((self.free_at, part))
        self.num_waiting = num_waiting + part
        return self.look(now, num_waiting, wait_s, part)

    def look(self, now: float, num_waiting: float, wait_s: float, part: float = 1.0) -> bool:
        return self.overload.look(
            now,
            num_waiting,
            wait_s,
            part,
            num_replicas=self.num_replicas,
            long_wait_s=LONG_WAIT_S,
        )


@given(RATES, st.lists(st.integers(1, 200), min_size=1, max_size=8))
def test_batches_are_no_overload_however_large(rate_per_s: float, sizes: list[int]) -> None:
    """Each comes in one moment, when the one before has been served."""
    queue, now = Queue(rate_per_s), 1.0
    for size in sizes:
        for _ in range(size):
            assert not queue.came(now)
        now = queue.free_at + 0.01


PART = st.floats(0.0, 1.0)


@given(RATES, st.lists(st.tuples(st.integers(1, 1000), PART, PART), min_size=1, max_size=4))
def test_what_is_read_within_half_the_time_that_makes_a_queue_old_is_no_overload(
    rate_per_s: float, bursts: list[tuple[int, float, float]]
) -> None:
    """Of 300 that were sent together and read over 0.5 s the last 37 were refused behind 0.2 s of queue.

    bursts: how many, of the longest wait the part that the fleet has to do for another Router already, and of
    that half the part that is taken for reading. Each comes when the one before has been served.
    """
    queue, now = Queue(rate_per_s), 1.0
    for number, others, reading in bursts:
        queue.free_at = now + others * MAX_WAIT_S
        reading_s = reading * YOUNG * MAX_WAIT_S / 2
        assert not any([queue.came(now + reading_s * each / number) for each in range(number)])
        now = max(queue.free_at, now + reading_s) + 0.01


@given(RATES, st.integers(1, 3000), st.floats(0.0, YOUNG * MAX_WAIT_S / 2))
def test_what_is_read_within_a_second_is_no_overload_however_much(
    rate_per_s: float, number: int, reading_s: float
) -> None:
    """Who would wait for longer than anybody may is refused, and counted all the same: nobody else is."""
    queue = Queue(rate_per_s)
    for each in range(number):
        now = 1.0 + reading_s * each / number
        if queue.free_at - now <= MAX_WAIT_S:
            assert not queue.came(now)
        else:
            assert not queue.look(now, queue.num_waiting, queue.free_at - now)
            queue.overload.refused(now)


@given(RATES, st.integers(1, 150), st.floats(0.0, 1.0), st.floats(0.0, 0.2))
def test_clients_with_one_request_each_are_no_overload_however_many(
    rate_per_s: float, num_clients: int, joining: float, thinking_s: float
) -> None:
    """They ask again when they are answered. joining: a part of half the time that makes a queue old."""
    joining_s = joining * YOUNG * MAX_WAIT_S / 2
    queue = Queue(rate_per_s)
    asks = [1.0 + joining_s * client / num_clients for client in range(num_clients)]
    heapq.heapify(asks)
    for _ in range(4 * num_clients):
        now = heapq.heappop(asks)
        assert not queue.came(now)
        heapq.heappush(asks, max(now, queue.free_at) + thinking_s)


@given(RATES, st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=4), min_size=1, max_size=FEW))
def test_a_few_clients_are_no_overload_however_large_their_batches(
    rate_per_s: float, sizes: list[list[int]]
) -> None:
    """Each sends its next when it has the last answer of the one before."""
    queue = Queue(rate_per_s)
    asks = [(1.0 + number / rate_per_s, number) for number in range(len(sizes))]
    heapq.heapify(asks)
    while asks:
        now, client = heapq.heappop(asks)
        size = sizes[client].pop()
        assert not any([queue.came(now, 1 / size) for _ in range(size)])
        if sizes[client]:
            heapq.heappush(asks, (queue.free_at, client))


@given(RATES, st.floats(1.2, 10.0), st.integers(0, 50))
def test_more_than_is_served_is_overload_before_the_queue_is_long(
    rate_per_s: float, load: float, num_first: int
) -> None:
    """Whatever was there first: when so many wait that what came since must be the larger part, or when the
    queue is old, if that is later.

    With growth from E0 at a steady rate, E reaches GROWTH * (E0 + E) / 2 + FEW at the former.
    """
    queue, now = Queue(rate_per_s), 1.0
    for _ in range(num_first):
        queue.came(now)
    most = (GROWTH * num_first / 2 + FEW) / (1 - GROWTH / 2)
    young = num_first + (load - 1) * YOUNG * MAX_WAIT_S * rate_per_s
    long = LONG_WAIT_S * rate_per_s
    while not queue.came(now):
        now += 1 / (load * rate_per_s)
        assert (queue.free_at - now) * rate_per_s <= 1.1 * max(most, young, long) + 4


@given(RATES, st.integers(3, 50), st.floats(1.0, 3.0))
def test_clients_that_were_there_for_long_hide_little_of_it(
    rate_per_s: float, num_clients: int, since: float
) -> None:
    """Half as many more, and a few, though the queue has stood for long: so many longest waits."""
    queue, now = Queue(rate_per_s), 1.0
    for _ in range(num_clients):
        queue.came(now)
    for _ in range(int(since * MAX_WAIT_S * rate_per_s)):
        now += 1 / rate_per_s  # one is answered, and asks again
        assert not queue.came(now)
    while not queue.came(now):
        now += 1 / (3 * rate_per_s)
        most = max(1.1 * (GROWTH * num_clients + FEW), LONG_WAIT_S * rate_per_s)
        assert (queue.free_at - now) * rate_per_s <= most + 4


@given(RATES, st.floats(1.5, 10.0), st.integers(100, 400))
def test_it_stays_while_refusals_keep_the_queue_short(rate_per_s: float, load: float, more: int) -> None:
    """And is over soon after: once nobody is refused, with the first who finds the queue empty."""
    queue, now = Queue(rate_per_s), 1.0
    while not queue.came(now):
        now += 1 / (load * rate_per_s)
    for number in range(more):
        is_refused = number * (1 - 1 / load) % 1 < 1 - 1 / load  # evenly
        assert queue.look(now, 0, 0.0)  # the queue is found empty, and there are refusals all the same
        if is_refused:
            queue.overload.refused(now)
    for _ in range(50):
        queue.look(now, 0, 0.0)
    assert not queue.overload.is_on(now)


@given(
    RATES, st.floats(1.5, 10.0), st.lists(st.floats(0.0, 0.9), max_size=5), st.floats(0.0, 2.0), st.booleans()
)
def test_it_ends_with_time_when_nobody_is_refused_whether_anybody_comes_or_not(
    rate_per_s: float, load: float, refusals: list[float], later: float, queue_stands: bool
) -> None:
    """An hour after the last request it was overload still, and then for 24 lone requests more.

    refusals: how long after the one before, of the time in which there must be none. later: so is the next
    who comes, after the last of them.
    """
    queue, now = Queue(rate_per_s), 1.0
    while not queue.came(now):
        now += 1 / (load * rate_per_s)
    for pause in refusals:
        now += pause * QUIET_S
        assert queue.overload.is_on(now)
        queue.overload.refused(now)
    if queue_stands:
        queue.look(now, 1.0, 3 * QUIET_S)
    now, is_over = now + later * QUIET_S, later >= 1.0
    assert queue.overload.is_on(now) is not is_over
    assert queue.look(now, 1.0, 2 * LONG_WAIT_S) is not is_over
    queue.overload.refused(now)  # for another reason
    assert queue.overload.is_on(now) is not is_over


@given(RATES, st.floats(1.5, 10.0), st.integers(2, 100), st.floats(0.1, 1.0))
def test_who_loses_replicas_is_excused_for_a_while_and_no_longer(
    rate_per_s: float, load: float, num_replicas: int, lost: float
) -> None:
    """Too many requests from when a tenth or more is lost: found when the excuse is over."""
    queue, now = Queue(rate_per_s), 1.0
    queue.num_replicas = num_replicas
    queue.came(now)
    queue.num_replicas = min(num_replicas - 1, int((1.0 - lost) * num_replicas))
    lost_at = now = queue.free_at + 1.0
    grown_s = (1.1 * FEW / (1 - GROWTH / 2) + 4) / ((load - 1) * rate_per_s)  # as in the test above
    while not queue.came(now):
        assert now < lost_at + max(MAX_WAIT_S, grown_s) + 2 / rate_per_s
        now += 1 / (load * rate_per_s)
    assert now >= lost_at + MAX_WAIT_S


@given(RATES, st.floats(1.5, 10.0), st.integers(11, 1000))
def test_one_of_many_that_come_and_go_excuses_nothing(
    rate_per_s: float, load: float, num_replicas: int
) -> None:
    queue, other, now = Queue(rate_per_s), Queue(rate_per_s), 1.0
    while True:
        queue.num_replicas = num_replicas - round(now * 10) % 2
        is_overload = queue.came(now)
        assert is_overload == other.came(now)
        if is_overload:
            return
        now += 1 / (load * rate_per_s)


@given(RATES, st.floats(1.5, 10.0), st.floats(0.0, 2 * MAX_WAIT_S))
def test_what_was_overload_for_long_is_overload_with_fewer(
    rate_per_s: float, load: float, later_s: float
) -> None:
    """What was told shortly before may have been the loss, which was not known yet: eight requests that
    waited 0.07 s before a replica's death was heard of had 17 refused who came then."""
    queue, now = Queue(rate_per_s), 1.0
    while not queue.came(now):
        now += 1 / (load * rate_per_s)
    queue.num_replicas = 1
    assert queue.came(now + later_s) is (later_s >= MAX_WAIT_S)
