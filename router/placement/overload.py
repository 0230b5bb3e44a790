"""Whether more keeps coming than is served: a queue that only grows, told from one that drains or stands.

    E = HTTP requests that wait here + those refused since the queue was last empty

So many clients, each with one request at a time, make E jump to their number at most, and stand. A body's
prompts count as parts of one request, or a few clients with batches would pass for many. A burst of requests
makes it jump once, then fall. Requests that come faster than they can be served, whoever sends them, make it
grow without end, refused or not. So the last is told from the others by its growth: in the second half of the
time since the queue was last empty E has become half as large again as it had ever been in the first half,
and a few more. That knows no rate, no speed and no number of clients, and finds 1.2 times capacity as well as
three times, only later.

A burst grows likewise for as long as it takes to read it. So nothing counts before the queue is a fifth of
`max_wait_s` old: what is read in half of that does not grow in the second half.

While it lost replicas a fleet is excused. The others take over what those had under way and compute anew
what only they had cached, so a queue grows as if too many came, and most times passes. It may have grown
before the loss was known, so what was told as shortly before is taken back. Not noticed is one replica of
many: a tenth of them has to go, since the last time that was so.

It is over when somebody who comes finds the queue empty, and of the latest who came few had to be refused:
a queue that is kept short empties now and then though three times too many come. Clients that come back as
often as they are refused are overload too: they cannot be told from others. It is over as well, whether
anybody comes or not, when nobody had to be refused for `quiet_s`.

Pure: knows counts and times; knows neither requests nor what is done about it.
Owner: the router's event loop.
"""

from __future__ import annotations

import math
from bisect import bisect_right

GROWTH = 1.5  # from the largest of the first half to now
FEW = 8  # requests more than that, so that small numbers do not count as growth
FEW_REFUSED = 1 / 8  # of those who came lately, when it is over
LATELY = 16  # requests, about
YOUNG = 1 / 5  # of `max_wait_s`: a queue younger than this is a burst's, whatever its size
LOST = 0.1  # of the replicas: what excuses a queue
_KEPT = 1.05  # a new maximum is noted when it is larger by so much: their number stays small


class Overload:
    """Looked at with each arrival, before it is counted."""

    def __init__(self, max_wait_s: float, quiet_s: float) -> None:
        """max_wait_s: what a burst may wait; so long a fleet is excused after it lost replicas, too. quiet_s:
        overload in which nobody is refused for so long is over."""
        self._max_wait_s = max_wait_s
        self._quiet_s = quiet_s
        self._is_told = False
        self._since = 0.0  # when the queue was last known empty, or was excused, by the caller's clock
        self._drained_at = -math.inf  # when all who were there have started that somebody last came behind
        self._told_at = 0.0  # when it was found to be overload, by the same clock
        self._refused_at = 0.0  # when somebody was refused last, or that was found, by the same clock
        self._num_refused = 0.0  # since the queue was last known empty
        self._num_replicas = 0  # now, or when it was a tenth more
        self._excused_until = 0.0  # by the same clock
        self._num_lately = 0.0  # refused, of about `LATELY` that came last; a mean that forgets
        # Maxima of E since then, each when it was reached: rising in both.
        self._reached_at: list[float] = []
        self._maxima: list[float] = []

    def is_on(self, now: float) -> bool:
        """Whether this is overload, by when somebody came last. Changes nothing; O(1)."""
        return self._is_told and now < self._refused_at + self._quiet_s

    def look(
        self,
        now: float,
        num_waiting: float,
        wait_s: float,
        part: float = 1.0,
        *,
        num_replicas: int,
        long_wait_s: float,
    ) -> bool:
        """Whether this is overload. O(log of the queue's length).

        num_waiting: HTTP requests, a part of one as such. wait_s: a newcomer's; 0 = none. part: of its HTTP
        request that the newcomer is. num_replicas: that take new requests.
        long_wait_s: a shorter wait is none yet.
        """
        self._count(num_replicas, now)
        self._num_lately *= 1.0 - part / LATELY
        if self._is_over(now, wait_s):
            self._begin_anew(now)
        self._drained_at = now + wait_s
        if wait_s <= 0.0 and not self._is_told:
            return False
        excess = num_waiting + self._num_refused
        if not self._is_told:
            is_old = now - self._since >= YOUNG * self._max_wait_s
            is_one = is_old and wait_s > long_wait_s and now >= self._excused_until
            self._is_told = is_one and self._has_grown(now, excess)
            if self._is_told:
                self._told_at = self._refused_at = now
                self._num_lately = LATELY  # nobody was refused yet, but now they will be
        if not self._maxima or excess > _KEPT * self._maxima[-1]:
            self._reached_at.append(now)
            self._maxima.append(excess)
        return self._is_told

    def refused(self, now: float, part: float = 1.0) -> None:
        """Somebody who came, or waited, was sent away; it is such a part of its HTTP request."""
        self._refused_at = now
        self._num_refused += part
        self._num_lately += part

    def _is_over(self, now: float, wait_s: float) -> bool:
        """The overload, or the queue that may become one."""
        # Who waits though the last queue is gone has come since, if only by way of another Router.
        is_empty = wait_s <= 0.0 or now > self._drained_at
        if self.is_on(now):
            return is_empty and self._num_lately <= FEW_REFUSED * LATELY
        return is_empty or self._is_told

    def _has_grown(self, now: float, excess: float) -> bool:
        middle = (self._since + now) / 2
        number = bisect_right(self._reached_at, middle)
        return excess >= GROWTH * (self._maxima[number - 1] if number else 0.0) + FEW

    def _count(self, num_replicas: int, now: float) -> None:
        if num_replicas > self._num_replicas:
            self._num_replicas = num_replicas
        elif 0 < self._num_replicas - num_replicas >= LOST * self._num_replicas:
            self._num_replicas = num_replicas
            self._excused_until = now + self._max_wait_s
            if now < self._told_at + self._max_wait_s:
                self._begin_anew(now)

    def _begin_anew(self, now: float) -> None:
        self._is_told = False
        self._since = now
        self._num_refused = 0.0
        self._reached_at.clear()
        self._maxima.clear()
