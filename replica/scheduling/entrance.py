"""Who may be taken in: whether a request can ever be served, and whether it would wait too long.

A queue that one tenant has filled is not full for another: each is held to its own part of it.
Knows limits, the load and how many wait; changes nothing. Engine thread only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from cache.events import Load
from replica.errors import PromptTooLong, QueueFull, TooLargeForCache, WaitTooLong
from replica.scheduling.load_account import Queued
from replica.scheduling.queue_time import queue_s
from replica.scheduling.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class Entrance:
    """The engine's limits."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_batched_tokens: int
    max_waiting: int  # beyond this nobody is put behind those that wait
    max_wait_s: float  # seconds of prefill; likewise

    @property
    def patience_s(self) -> float:
        """Who was let in and has not begun after so long is told to go: by a factor of two more was before it
        than was known, as of answers that turn out to be far longer than those of late."""
        return 2.0 * self.max_wait_s

    def check_size(self, num_prompt_tokens: int, max_output_tokens: int) -> None:
        """Raises PromptTooLong or TooLargeForCache."""
        if num_prompt_tokens >= self.max_model_len:
            raise PromptTooLong(num_prompt_tokens, self.max_model_len - 1)
        # The last token is never computed, so it needs no slot.
        if num_prompt_tokens + max_output_tokens - 1 > self.num_blocks * self.block_size:
            raise TooLargeForCache(num_prompt_tokens, max_output_tokens, self.num_blocks, self.block_size)

    def check_places(self, waiting: WaitingQueue, tenant: str) -> None:
        """Raises QueueFull.

        Where others have filled the queue a tenant may still have what would be its part, were it divided
        equally among those who wait: so at most twice as many wait as are allowed.
        """
        if len(waiting) < self.max_waiting:
            return
        num_tenants = len(waiting.tenants | {tenant})
        if waiting.num_of(tenant) >= self.max_waiting // num_tenants:
            raise QueueFull(len(waiting), self.max_waiting)

    def check_wait(
        self,
        load: Load,
        queued: Mapping[str, Queued],
        waiting: WaitingQueue,
        *,
        tenant: str,
        share: float,
        deadline_s: float | None,
    ) -> None:
        """Raises WaitTooLong. queued: by tenant, what of all that is here may go before the newcomer.

        deadline_s: after which nobody wants it; None = it may wait as long as anybody.
        """
        longest_s = self.max_wait_s if deadline_s is None else min(self.max_wait_s, deadline_s)
        if not waiting or longest_s == math.inf:
            return
        before = _before(load, queued, Queued(share, 0) if tenant not in queued else queued[tenant])
        # Unmeasured, a deadline is not judged by: what takes how long is a guess then, for bursts.
        wait_s = queue_s(before, self.max_batched_tokens, self.max_wait_s)
        if wait_s > (longest_s if load.step_time is not None else self.max_wait_s):
            raise WaitTooLong(len(waiting), self.max_waiting, wait_s, longest_s)


def _before(load: Load, queued: Mapping[str, Queued], own: Queued) -> Load:
    """What of it goes before a newcomer: of each other tenant's as much as of its own, share for share."""
    total, per_share = load.queued_uncached_tokens, own.tokens / own.share
    before = round(sum([min(per_share * each.share, each.tokens) for each in queued.values()]))
    if before >= total:
        return load
    share = before / total
    return msgspec.structs.replace(
        load,
        queued_uncached_tokens=before,
        queued_attention=int(share * (load.queued_attention or 0)),
        num_waiting=int(share * load.num_waiting),
    )
