"""Those who hold blocks, and how one comes to hold them and is put back.

Knows requests and blocks; knows neither steps nor whose turn it is. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable

from cache.errors import NoFreeBlocks
from cache.prefix_cache import PrefixCache
from replica.scheduling.request import Request, RequestState
from replica.scheduling.waiting_queue import WaitingQueue


class Running:
    """`requests` is in order of admission, answers to one prompt side by side."""

    def __init__(self, cache: PrefixCache, waiting: WaitingQueue, *, swaps: bool = False) -> None:
        """waiting: where they come from, and are put back to. swaps: what `preempt` does."""
        self._swaps = swaps
        self._cache = cache
        self._waiting = waiting
        self.requests: list[Request] = []
        self.num_preemptions = 0  # since the start
        self.num_swapped = 0  # of those, that kept what they had computed

    def __len__(self) -> int:
        return len(self.requests)

    def start(self, request: Request, hit_tokens: int, now_s: float) -> None:
        """It waits no longer: its blocks are there, and so many of its tokens are in them already."""
        self._waiting.remove(request)
        request.state = RequestState.RUNNING
        request.num_computed = hit_tokens
        request.num_charged = max(request.num_charged, hit_tokens)
        if request.cached_tokens is None:
            request.cached_tokens = min(hit_tokens, request.num_prompt_tokens)
        if request.admitted_s is None:  # what it begins on is the prompt of those that follow it, too
            for each in (request, *request.followers):
                each.admitted_s = now_s
        self.requests.append(request)

    def fork(self, leader: Request, followers: list[Request], places: Callable[[], int]) -> None:
        """The leader's prompt is computed: those that follow start on it, each with the last prompt token
        to compute again, for a first token of its own. Who finds no place or no block waits, where its leader
        did.

        places: that may be taken in all when the next of them starts.
        """
        place = self.requests.index(leader) + 1
        for follower in followers:
            follower.cached_tokens = leader.cached_tokens
            follower.expected_hit = self._cached_prompt(follower)  # if it waits now, or is put back later
            follower.has_followed = True
            if len(self.requests) < places() and self._try_fork(leader, follower):
                follower.state = RequestState.RUNNING
                self.requests.insert(place, follower)
                place += 1
            else:
                follower.state = RequestState.WAITING
                self._waiting.add(follower)

    def _cached_prompt(self, follower: Request) -> int:
        """Leading tokens of its prompt, now that it is computed, that a lookup finds. O(1)."""
        if not follower.blocks.looks_up:
            return 0
        found_at_most = follower.num_prompt_tokens - 1
        return found_at_most - found_at_most % self._cache.block_size

    def _try_fork(self, leader: Request, follower: Request) -> bool:
        num_tokens = leader.num_prompt_tokens - 1
        if not num_tokens:
            return False
        try:
            self._cache.fork(leader.blocks, follower.blocks, num_tokens)
        except NoFreeBlocks:
            return False
        follower.num_computed = follower.num_charged = num_tokens
        return True

    def try_grow(self, request: Request, num_tokens: int, *, is_computed: bool) -> bool:
        """Blocks for so many more of its tokens; False, and nothing has changed, if too few are free.

        is_computed: the coming step computes them. Else nobody finds them yet.
        """
        take = self._cache.grow if is_computed else self._cache.reserve
        try:
            take(request.blocks, request.num_computed + num_tokens)
        except NoFreeBlocks:
            return False
        return True

    def preempt(self, victim: Request) -> None:
        """`put_back` one that has no part in the coming step; what it has computed may be kept for it."""
        num_computed = victim.num_computed
        if self._swaps and num_computed and self._cache.swap_out(victim.blocks, num_computed):
            self.num_swapped += 1
            victim.expected_hit = num_computed
            self._wait_again(victim)
        else:
            self.put_back(victim)

    def put_back(self, victim: Request) -> None:
        """Among those that wait, in its own place, with nothing computed."""
        self._cache.release(victim.blocks)
        self._wait_again(victim)

    def _wait_again(self, victim: Request) -> None:
        self.requests.remove(victim)
        if victim.logprobs is not None and not victim.logprobs.scores_prompt:
            self._cache.allow_hits(victim.blocks)  # that its prompt was computed whole has served its purpose
        victim.state = RequestState.WAITING
        victim.num_computed = 0
        victim.halfway = None
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(victim)
