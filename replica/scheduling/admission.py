"""Who may start beside those who run: whether there is a place, and blocks for all that it will be.

Who is let in with less is the first to be thrown out again, computed anew, and thrown out again
(docs/design/017-room-for-answers.md). Knows running requests, blocks and how long answers are; knows neither
who waits nor in which order. Engine thread only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cache.kv_cache_manager import PrefixHit
from cache.prefix_cache import PrefixCache
from replica.scheduling.answer_lengths import AnswerLengths
from replica.scheduling.headroom import SPARE, Growth, peak_blocks
from replica.scheduling.request import Request


class Admission:
    """Changes nothing but what it remembers of answers and of who did not fit."""

    def __init__(self, cache: PrefixCache, *, num_blocks: int, block_size: int) -> None:
        self._cache = cache
        self._block_size = block_size
        self._spare_blocks = int(SPARE * num_blocks)
        self._answers = AnswerLengths()
        # Who did not fit into how many free blocks, beside how many others: matching a long prompt anew in
        # every step, with nothing changed, would cost more than a rare better hit gains.
        self._misfit: tuple[Request, int, int] | None = None

    def observe(self, num_output_tokens: int) -> None:
        """An answer has ended by itself: later ones are expected to be like it."""
        self._answers.observe(num_output_tokens)

    def hit(self, request: Request, running: Sequence[Request]) -> PrefixHit | None:
        """What the cache holds of it, if there is room beside `running`; None if there is not.

        O(blocks matched + running), but O(1) while nothing has changed since it did not fit.
        """
        situation = (request, self._cache.num_free, len(running))
        if self._misfit == situation:
            return None
        hit = self._cache.match(request.blocks)
        if self._has_room(request, hit, running):
            return hit
        self._misfit = situation
        return None

    def has_place(self, running: Sequence[Request], max_running: int, most_followed: int) -> bool:
        """Whether one more may run beside these. It need not have places for those that follow it: who finds
        none when the prompt is computed waits, and nobody else for all of them.

        most_followed: of all places, that those which follow others may come to take.
        """
        taken = len(running)
        num_followers = sum([len(leader.followers) for leader in running])
        return taken + min(num_followers, max(0, most_followed - taken)) < max_running

    def growth_blocks(self, running: Sequence[Request]) -> int:
        """Of the free blocks, those kept for the answers of `running`."""
        return peak_blocks(self._growths(running)) + self._spare_blocks

    def _has_room(self, request: Request, hit: PrefixHit, running: Sequence[Request]) -> bool:
        """Whether all it has so far fits, and its answer beside those of everybody who runs, as expected.

        Alone it fits: that was checked when it was submitted, and is what guarantees progress.
        """
        needed = self._cache.blocks_needed(request.blocks, hit, len(request.token_ids) - hit.num_tokens)
        if needed > self._cache.num_free or not running:
            return needed <= self._cache.num_free
        growths = [
            Growth(needed, self._answer_blocks(request), hit.num_idle),
            *self._follower_growths(request),
        ]
        return peak_blocks([*growths, *self._growths(running)]) + self._spare_blocks <= self._cache.num_free

    def _growths(self, running: Sequence[Request]) -> list[Growth]:
        """Asked in every step, while few take a block in it: who has not is as it was."""
        sharings, num_seen, growths = self._cache.sharings, self._answers.num_seen, []
        for request in running:
            needed, held = self._cache.new_blocks(len(request.token_ids)), len(request.blocks.block_table)
            situation = (needed, held, sharings, num_seen)
            if request.growth is None or request.growth_in != situation:
                request.growth, request.growth_in = self._growth(request), situation
            growths.append(request.growth)
            if request.followers:
                growths += self._follower_growths(request)
        return growths

    def _follower_growths(self, leader: Request) -> list[Growth]:
        """Each begins with a copy of the prompt's last block."""
        return [Growth(1, self._answer_blocks(follower), own=0) for follower in leader.followers]

    def _growth(self, request: Request) -> Growth:
        held = len(request.blocks.block_table)
        return Growth(
            certain=max(0, self._cache.new_blocks(len(request.token_ids)) - held),
            expected=self._answer_blocks(request),
            own=self._cache.num_own(request.blocks),
        )

    def _answer_blocks(self, request: Request) -> int:
        """Blocks that it will still take beyond those of the tokens it has.

        As if it had filled the last of these: what is expected then changes with its blocks alone, and
        nobody need be asked again in a step that takes none.
        """
        blocks = max(len(request.blocks.block_table), self._cache.new_blocks(len(request.token_ids)))
        so_far = blocks * self._block_size - request.num_prompt_tokens
        more = self._answers.expected(so_far, request.max_output_tokens) - so_far
        return max(0, math.ceil(more / self._block_size))
