"""How many blocks those who run will still take, so that nobody is let in whom they would throw out again.

    held now | rest of the prompt, for certain | answer, as expected | given back at the end
             |<------------------- growth ------------------------->|

Not everybody is at their largest at once: who ends first gives back what the others then take. So what counts
is the peak: the most that all together hold beyond what they hold now, at the end of any of them.
Pure arithmetic: knows blocks; knows neither requests nor the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# Of all blocks, left free when somebody is let in beside others: answers are not quite as expected.
# Without it ten times as many are thrown out, with twice as much answers come no faster (docs/design/017).
SPARE = 1 / 32


class Growth(NamedTuple):
    """One sequence's way to its end, in blocks."""

    certain: int  # that it takes before it answers
    expected: int  # that its answer takes after those
    own: int  # of those it holds now, what nobody else holds: they come free with its end


def peak_blocks(growths: Iterable[Growth]) -> int:
    """The most blocks that they will hold together beyond those they hold now; at least 0. O(n log n).

    All answers grow by one block in the same time: whoever expects the fewest ends first.
    """
    ordered = sorted(growths, key=lambda growth: growth.expected)
    alive, certain, given_back, peak = len(ordered), sum(g.certain for g in ordered), 0, 0
    for growth in ordered:
        peak = max(peak, certain + alive * growth.expected - given_back)
        alive -= 1
        certain -= growth.certain
        given_back += growth.own
    return peak
