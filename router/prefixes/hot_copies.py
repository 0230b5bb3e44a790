"""Hot prefixes, computed on one more replica beside the requests that made them hot.

A decision says that a copy is worth making and where (`placement/weighing.py`); here the replica is sent it,
and nobody waits for it. It is tried once. Knows replica calls and bookings; decides nothing.
Owner: the router's event loop.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from cache.errors import ServingError
from cache.messages import GenerateRequest, SamplingParams
from router.dispatch.deadline import until_deadline
from router.dispatch.replica_calls import ReplicaCalls
from router.errors import ReplicaLost
from router.placement.decision import Placement, RouteQuery
from router.placement.routing import Routing
from router.prefixes.own_tasks import OwnTasks

LIMIT_S = 30.0  # after which it is not wanted any more: what is hot is counted over a minute or two

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HotCopyStatistics:
    """Since the start, of this Router."""

    num_made: int
    num_failed: int  # refused, lost, or not made in time
    num_tokens: int  # computed for those that were made


class HotCopies:
    """Has the copies made that `routing` wants, from its construction until `aclose`."""

    def __init__(
        self,
        routing: Routing,
        calls: ReplicaCalls,
        work_told: Callable[[], tuple[float, float]],
        charge: Callable[[str, int, float], None],
    ) -> None:
        """work_told: of `GenerateRequest`, what every request tells of this Router: `held_s` and
        `refused_ratio`. charge: a tenant, tokens that were computed for it, its share."""
        self._routing = routing
        self._calls = calls
        self._work_told = work_told
        self._charge = charge
        self._tasks = OwnTasks()
        self._num_made = self._num_failed = self._num_tokens = 0
        routing.make_copies(self._order)

    def statistics(self) -> HotCopyStatistics:
        return HotCopyStatistics(self._num_made, self._num_failed, self._num_tokens)

    async def aclose(self) -> None:
        """Give up those that are being made, and want no more. Idempotent."""
        self._routing.make_copies(None)
        await self._tasks.aclose()

    def _order(self, query: RouteQuery, placement: Placement) -> None:
        self._tasks.start(self._make(query, placement))

    async def _make(self, query: RouteQuery, placement: Placement) -> None:
        try:
            cached = await self._compute(self._request(query, placement))
        except ServingError as error:
            self._num_failed += 1
            self._routing.copy_failed(query, placement.replica_id)
            fields = {"replica_id": placement.replica_id, "error_type": type(error).__name__}
            logger.info("a hot prefix was not copied", extra=fields)
        else:
            computed = query.num_prompt_tokens - cached
            self._num_made += 1
            self._num_tokens += computed
            self._charge(query.tenant, computed, query.share)  # as its engine does
        finally:
            self._routing.release(query.request_id)

    async def _compute(self, request: GenerateRequest) -> int:
        """Tokens of it that were cached already."""
        deltas = until_deadline(self._calls.generate(request), LIMIT_S)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                replica_id = self._routing.accepted_by(request.request_id) or request.ranks[0]
                self._routing.first_token(request.request_id, replica_id, delta.cached_tokens)
                if delta.finish_reason is not None:
                    return delta.cached_tokens
        raise ReplicaLost("its stream ended without a finish_reason")

    def _request(self, query: RouteQuery, placement: Placement) -> GenerateRequest:
        assert query.token_ids is not None, "a Router knows the tokens of what it places"
        held_s, refused_ratio = self._work_told()
        return GenerateRequest(
            request_id=query.request_id,
            token_ids=query.token_ids,
            num_prompt_tokens=query.num_prompt_tokens,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            seed=0,
            cache_salt=query.cache_salt,
            tenant=query.tenant,
            share=query.share,
            priority=query.priority,
            excluded_replicas=query.excluded,
            ranks=placement.ranks,
            block_hashes=placement.block_hashes,
            deadline_s=LIMIT_S,
            for_cache=True,
            held_s=held_s,
            refused_ratio=refused_ratio,
        )
