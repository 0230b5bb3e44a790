"""What a request looks like to the cost, beside its length: what computing again is charged, and what is hot.

Both follow from what all requests did lately: how many wait, and which prefixes they begin with. It shapes
every request, whichever policy ranks, so that another policy's decisions can be priced beside the default's.

Knows hints, queues and the default policy's knobs; knows neither names nor backlogs.
Owner: the router's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cache.types import HashHint
from router.placement.hot_prefixes import HotPrefixes
from router.policies.expected_time import ExpectedTime
from router.pricing.cost import RequestShape
from router.pricing.fleet_queue import FleetQueue
from router.pricing.queue_average import QueueAverage
from router.pricing.taken_share import TakenShare


def usable_tokens(num_blocks: int, num_prompt_tokens: int, block_size: int) -> int:
    """Tokens of a prefix hit; at least one token of a prompt is always computed."""
    return min(num_blocks, max(0, (num_prompt_tokens - 1) // block_size)) * block_size


class Shaper:
    """Remembers what was routed, how many waited, and how often no replica was free; `shape` notes the second
    by itself."""

    def __init__(self, block_size: int, priced: ExpectedTime, peers: Callable[[], tuple[int, int]]) -> None:
        """peers: this router's place among the routers of the same replicas, and their number."""
        self._block_size = block_size
        self._priced = priced
        self._peers = peers
        self._hot = HotPrefixes(block_size)
        self._queue = QueueAverage()
        self._taken = TakenShare()

    def shape(
        self,
        hints: Sequence[HashHint],
        num_prompt_tokens: int,
        cached: Sequence[int],
        queue: FleetQueue,
        num_held: int,
        now: float,
        least_copies: int = 0,
    ) -> RequestShape:
        """cached: the prompt's usable tokens, on each replica that it may go to; not empty. queue: at those.
        num_held: requests that wait at this router. least_copies: of a hot prefix, for one more to be an
        investment.
        """
        # Requests come to the routers alike: what waits at the others is about as much as what waits here.
        mean_queued = self._queue.update(queue.mean(num_held * self._peers()[1]), now)
        weight = self._priced.charge.weight(mean_queued, self._taken.value)
        least_uses, most = self._priced.uses_of_a_copy(mean_queued), max(cached)
        hot_blocks = self._hot.num_hot_blocks(hints, least_uses)
        if hot_blocks and (hot_tokens := usable_tokens(hot_blocks, num_prompt_tokens, self._block_size)):
            # Each copy gets its part of the uses: with one more, would each still be used enough?
            num_copies = len([held for held in cached if held >= hot_tokens]) + 1
            share = num_copies / self._hot.num_uses(hints, hot_blocks)
            if share * least_uses <= 1.0 and num_copies > least_copies:
                return RequestShape(num_prompt_tokens, hot_tokens, weight, share, most)
        return RequestShape(num_prompt_tokens, recompute_weight=weight, most_cached=most)

    def shared_prefix(self, hints: Sequence[HashHint], num_prompt_tokens: int) -> tuple[HashHint, int] | None:
        """The last block of what it shares with several others, and its tokens, usable; None: nothing."""
        num_shared = self._hot.num_shared_blocks(hints)
        tokens = usable_tokens(num_shared, num_prompt_tokens, self._block_size)
        return (hints[num_shared - 1], tokens) if tokens else None

    def arrived(self, free_part: float) -> None:
        """A request came, and found so much of a replica free at the most; each counts once."""
        self._taken.note(free_part)

    def routed(self, hints: Sequence[HashHint], num_prompt_tokens: int, now: float) -> None:
        """A prompt of these full blocks was sent somewhere."""
        self._hot.record(hints, num_prompt_tokens, now)

    def uses_of_blocks(self, hints: Iterable[HashHint]) -> float:
        """How often any of these was asked for in the last minute or two, all together."""
        return self._hot.sum_of_uses(hints)

    def num_missed_blocks(self, hints: Sequence[HashHint], available_tokens: int) -> int:
        """Blocks behind those tokens that some prompt had in the last minute or two, as far as counted."""
        return self._hot.num_used_after(hints, available_tokens // self._block_size)
