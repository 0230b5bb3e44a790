"""Prefixes this engine was asked to hold, and until when.

    take ──(all of it is cached)──────────> held ──> released, or expired
      └──> promised ──(it was computed)───────^
                 └──(cancelled, failed)──> nothing is left of it

A pin comes as a request (`PinLease`): it waits, is computed in chunks and may be preempted as any other, and
ends with its first token, which nobody sees. Knows requests, leases and the engine's clock; the cache knows
which blocks. Engine thread only.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

from cache.engine_report import MAX_PINS, HeldPin
from cache.errors import PinsFull
from cache.kv_cache_manager import KVCacheManager
from cache.messages import GenerateRequest, HeldPrefix, PinLease
from cache.types import PinId
from replica.errors import InvalidRequest, RequestRefused
from replica.scheduling.request import Request


def pin_limit(num_blocks: int, block_size: int, *, max_fraction: float, max_model_len: int) -> int:
    """Blocks that pins may hold: their share of the pool, less what the longest request may need.

    So whatever is pinned, a request that this replica promises to serve finds room, if need be by preempting
    all others.
    """
    longest = -(-min(max_model_len, num_blocks * block_size) // block_size)
    return max(0, min(int(num_blocks * max_fraction), num_blocks - longest))


@dataclass(frozen=True, slots=True)
class _Held:
    lease: PinLease
    num_blocks: int
    token_ids: array[int]  # of these blocks
    ends_s: float  # engine clock


class EnginePins:
    """Leases on what the cache holds."""

    def __init__(self, cache: KVCacheManager, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._held: dict[PinId, _Held] = {}
        self.version = 0  # changes whenever what is held does

    def check(self, request: GenerateRequest) -> None:
        """Raises InvalidRequest for a lease that no router of ours would send, RequestRefused for one that
        does not fit here."""
        lease = request.pin
        assert lease is not None
        if not self._cache.prefix_caching:
            raise RequestRefused("pin: this replica keeps no prefixes: prefix_caching is off")
        if len(request.token_ids) != request.num_prompt_tokens:
            raise InvalidRequest("pin", "a prompt is held, no output")
        if request.num_prompt_tokens < self._cache.block_size:
            raise InvalidRequest("pin", f"{request.num_prompt_tokens} tokens fill no block")
        if not (math.isfinite(lease.seconds) and lease.seconds > 0):
            raise InvalidRequest("pin", f"seconds = {lease.seconds} is not a finite number above 0")
        if lease.pin_id in self._cache.pins:
            raise RequestRefused(f"pin: {lease.pin_id!r} is held here already")

    def take(self, request: Request) -> bool:
        """Hold the prompt's full blocks now if all are cached; else promise them room until `settle`.

        Whether they are held. Raises PinsFull, and changes nothing, if they do not fit beside other pins.
        """
        lease, num_blocks = self._lease(request), self._num_blocks(request)
        if len(self._cache.pins) >= MAX_PINS:
            raise PinsFull(needed=num_blocks, left=0)
        if self._hold(request):
            return True
        self._cache.promise_pin(lease.pin_id, request.blocks, num_blocks)
        return False

    def hold(self, request: Request) -> None:
        """Hold what was just computed, while the request still has it.

        Raises PinsFull if it does not fit any more, RequestRefused if the cache would not take a block.
        """
        if not self._hold(request):
            raise RequestRefused("pin: a block's hash is another prompt's")

    def ended(self, request: Request) -> None:
        """The request is over: room it was promised and did not use is free again."""
        pin_id = self._lease(request).pin_id
        if pin_id not in self._held:
            self._cache.unpin(pin_id)

    def release(self, pin_id: PinId) -> bool:
        """Give back what it holds; whether it held something."""
        if self._held.pop(pin_id, None) is None:
            return False
        self._cache.unpin(pin_id)
        self.version += 1
        return True

    def inherit(self, pin_id: PinId, keeper: str, heir: str) -> HeldPrefix | None:
        """Let `heir` keep it in place of `keeper`; what it holds. Of several heirs the first gets it.

        None, and nothing changes, where it is not held or kept by somebody else. May be asked twice.
        """
        held = self._held.get(pin_id)
        if held is None or held.lease.keeper not in (keeper, heir):
            return None
        if held.lease.keeper != heir:
            self._held[pin_id] = replace(held, lease=replace(held.lease, keeper=heir))
            self.version += 1
        return HeldPrefix(held.token_ids, held.lease.cache_salt)

    def expire(self) -> None:
        """Give back what has been held long enough. O(pins)."""
        now_s = self._clock()
        for pin_id in [pin_id for pin_id, held in self._held.items() if now_s >= held.ends_s]:
            self.release(pin_id)

    def held(self) -> tuple[HeldPin, ...]:
        """As reports tell it, oldest first."""
        return tuple(
            HeldPin(
                pin_id=lease.pin_id,
                owner=lease.owner,
                num_blocks=held.num_blocks,
                copies=lease.copies,
                created_at=lease.created_at,
                expires_at=lease.expires_at,
                keeper=lease.keeper,
            )
            for held in self._held.values()
            for lease in (held.lease,)
        )

    def _hold(self, request: Request) -> bool:
        lease, num_blocks = self._lease(request), self._num_blocks(request)
        if not self._cache.pin(lease.pin_id, request.blocks, num_blocks):
            return False
        token_ids = request.token_ids[: num_blocks * self._cache.block_size]
        self._held[lease.pin_id] = _Held(lease, num_blocks, token_ids, self._clock() + lease.seconds)
        self.version += 1
        return True

    def _num_blocks(self, request: Request) -> int:
        return request.num_prompt_tokens // self._cache.block_size

    @staticmethod
    def _lease(request: Request) -> PinLease:
        assert request.lease is not None, "not a request to hold anything"
        return request.lease
