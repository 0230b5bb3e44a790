"""How long answers are here, learned from those that have ended, and so how much longer one will be.

A request says how long its answer may be at most; most end far sooner. What their blocks will be is asked of
the answers seen: of those that were longer than this one is by now, the mean of what followed.
Pure arithmetic: knows counts of tokens; knows neither requests nor blocks.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from itertools import accumulate

REMEMBERED = 512  # answers: a change in traffic is followed within a few hundred of them
# While none has ended, and beyond the longest seen: an answer goes on for as long as it has gone on so far,
# and for a paragraph at least.
LEAST_GUESS = 128


class AnswerLengths:
    """The latest answers' lengths, in tokens."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._ordered: list[int] = []
        self._sums: list[int] | None = None  # of the first so many of `_ordered`; None: to be made
        self.num_seen = 0  # while it stands still, so does what is expected

    def observe(self, num_tokens: int) -> None:
        """An answer has ended by itself. O(remembered)."""
        self.num_seen += 1
        self._latest.append(num_tokens)
        insort(self._ordered, num_tokens)
        if len(self._latest) > REMEMBERED:
            gone = self._latest.popleft()
            del self._ordered[bisect_right(self._ordered, gone) - 1]
        self._sums = None

    def expected(self, so_far: int, at_most: int) -> float:
        """Tokens in all of an answer that has `so_far` and goes on; above that, up to `at_most`.

        O(log remembered).
        """
        if so_far >= at_most:
            return at_most
        first = bisect_right(self._ordered, so_far)
        num_longer = len(self._ordered) - first
        if not num_longer:
            return min(at_most, so_far + max(so_far, LEAST_GUESS))
        if self._sums is None:
            self._sums = [0, *accumulate(self._ordered)]
        cut = max(first, bisect_right(self._ordered, at_most))
        tokens = self._sums[cut] - self._sums[first] + at_most * (len(self._ordered) - cut)
        return tokens / num_longer
