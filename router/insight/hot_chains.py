"""Which prefixes the routed prompts share: a small tree of runs of blocks, the hottest of which are shown.

    run [0, 122)  every prompt             A run is a stretch of blocks without a branch. It is cut in two
      ├─ run [122, 160)  some of them      where a prompt parts from it or ends, so a run's prompts are those
      └─ run [122, 131)  the others        that go all the way through it.

Uses decay: one that is a half-life old counts half. Bounded in runs, in blocks and in runs per prompt; beyond
that the leaf that was used longest ago goes first, so a prefix stays that comes back before as many others
as there are runs. What was cached of a run follows from the engines' own counts.

Knows 64-bit hints; shows only names made of them under a secret, so nobody can look a guessed prompt up.
Knows neither tokens nor text. Owner: the router's event loop.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import secrets
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cache.types import HashHint, ReplicaId, RequestId
from router.insight.held_memory import as_words
from router.placement.decision import DecisionRecord, RouteQuery
from router.placement.observer import SilentObserver

HALF_LIFE_S = 300.0
MAX_RUNS = 2048  # in all, half a kilobyte each
MAX_BLOCKS = 1 << 18  # of all runs together, 8 bytes each
MAX_PROMPT_RUNS = 64  # what lies deeper is not followed: it bounds the work that one prompt can make
MAX_PROMPT_BLOCKS = 8192
NAME_BYTES = 5  # among two thousand runs two have the same name with a chance of one in half a million
_MAX_EXPONENT = 256.0  # half-lives before all weights are scaled down again


class _Run:
    """Blocks [start, end) of every prompt that goes through it."""

    __slots__ = ("answered", "cached", "children", "end", "hints", "name", "num_holders", "parent", "weight")

    def __init__(self, parent: _Run | None, hints: array[int], end: int) -> None:
        self.parent = parent
        self.hints = hints  # of its own blocks, parent first
        self.end = end
        self.children: dict[int, _Run] = {}  # by their first block
        self.weight = 0.0  # prompts through it, decayed
        self.answered = 0.0  # of those, with a first token
        self.cached = 0.0  # of `answered`, the part of the run that came from a cache
        self.num_holders = 0  # replicas that held all of it at its last decision
        self.name: str | None = None  # made when it is first shown

    @property
    def start(self) -> int:
        return self.end - len(self.hints)


@dataclass(frozen=True, slots=True)
class HotRun:
    """One run to be shown."""

    name: str  # keyed, in hexadecimal
    parent: int | None  # index in the same list; None: prompts begin with it
    start: int  # blocks [start, end) of a prompt
    end: int
    share: float  # of all prompts followed, those that go through it; 0..1
    per_minute: float  # prompts through it, over the last half-life or so
    hit_ratio: float | None  # of its tokens asked for, those from a cache; None: no first token yet
    num_holders: int  # replicas that held it at its last decision


class HotChains(SilentObserver):
    """Follows every routed prompt's chain. O(runs of the prompt + its new blocks) a request."""

    def __init__(
        self,
        block_size: int,
        *,
        clock: Callable[[], float],
        half_life_s: float = HALF_LIFE_S,
        max_runs: int = MAX_RUNS,
        max_blocks: int = MAX_BLOCKS,
        secret: bytes | None = None,
    ) -> None:
        """secret: of the shown names, 16 bytes or more; drawn at random if not given."""
        self._block_size = block_size
        self._clock = clock
        self._half_life_s = half_life_s
        self._max_runs = max_runs
        self._max_blocks = max_blocks
        self._key = (secret if secret is not None else secrets.token_bytes(32))[:64]
        self._root = _Run(None, array("Q"), 0)
        self._leaves: OrderedDict[_Run, None] = OrderedDict()  # the one used longest ago first
        self._num_runs = 0
        self._num_blocks = 0
        self._since = self._weighed_from = clock()  # when following began; when a use weighed 1
        # Requests that have been counted; their chain until the first token, then ().
        self._open: dict[RequestId, Sequence[HashHint]] = {}

    @property
    def num_runs(self) -> int:
        return self._num_runs

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_open(self) -> int:
        return len(self._open)

    def hottest(self, most: int, *, min_share: float = 0.0) -> list[HotRun]:
        """The runs that most prompts go through, parents before children. O(runs) at worst."""
        total = self._root.weight
        if not total:
            return []
        per_minute, least = self._per_minute(), min_share * total
        found: list[HotRun] = []
        waiting: list[tuple[float, int, int | None, _Run]] = []  # a heap: heaviest first, then as offered
        number = 0
        parent: int | None = None
        run = self._root
        while True:
            heavy = [child for child in run.children.values() if child.weight >= least]
            for child in heapq.nlargest(most - len(found), heavy, key=_weight_of):
                number += 1
                heapq.heappush(waiting, (-child.weight, number, parent, child))
            if not waiting or len(found) >= most:
                return found
            _, _, above, run = heapq.heappop(waiting)
            parent = len(found)
            found.append(self._view(run, above, total, per_minute))

    # --- RoutingObserver ----------------------------------------------------------------------

    def decided(self, record: DecisionRecord, query: RouteQuery, hints: Sequence[HashHint]) -> None:
        if query.request_id in self._open:
            return  # another attempt at a request that has been counted
        hints = self._open[query.request_id] = hints[:MAX_PROMPT_BLOCKS]
        if not hints:
            return  # shorter than a block
        weight = self._weight_now()
        held = sorted(record.ranking.cached)
        usable = max(0, query.num_prompt_tokens - 1) // self._block_size  # a decision knows of no more
        self._root.weight += weight
        path = self._enter(hints)
        for run in path:
            run.weight += weight
            run.num_holders = len(held) - bisect_left(held, max(1, min(run.end, usable)) * self._block_size)
        if path[-1] in self._leaves:
            self._leaves.move_to_end(path[-1])
        self._evict()

    def first_token(self, request_id: RequestId, replica_id: ReplicaId, cached_tokens: int) -> None:
        hints = self._open.get(request_id)
        if not hints:
            return
        self._open[request_id] = ()
        weight, cached_blocks = self._weight_now(), cached_tokens // self._block_size
        for run in self._follow(hints):
            from_cache = min(max(cached_blocks - run.start, 0), len(run.hints))
            run.answered += weight
            run.cached += weight * from_cache / len(run.hints)

    def finished(self, request_id: RequestId, hints: Sequence[HashHint], answers: Sequence[int]) -> None:
        self._open.pop(request_id, None)

    # --- the tree -----------------------------------------------------------------------------

    def _enter(self, hints: Sequence[HashHint]) -> list[_Run]:
        """The runs of this prompt, cut and added to as needed. O(runs * log(blocks) + new blocks)."""
        path: list[_Run] = []
        run, at = self._root, 0
        while at < len(hints) and len(path) < MAX_PROMPT_RUNS:
            child = run.children.get(hints[at])
            if child is None:
                child = self._append(run, _packed(hints[at:]))
            else:
                shared = _shared_blocks(child.hints, hints, at)
                if shared < len(child.hints):
                    child = self._cut(child, shared)
            path.append(child)
            run, at = child, child.end
        return path

    def _follow(self, hints: Sequence[HashHint]) -> Iterable[_Run]:
        """The runs of a prompt entered before, as far as they are still there."""
        run, at = self._root, 0
        while at < len(hints):
            child = run.children.get(hints[at])
            if child is None or child.end > len(hints) or child.hints[-1] != hints[child.end - 1]:
                return
            yield child
            run, at = child, child.end

    def _append(self, parent: _Run, hints: array[int]) -> _Run:
        run = _Run(parent, hints, parent.end + len(hints))
        parent.children[hints[0]] = run
        self._leaves.pop(parent, None)
        self._leaves[run] = None
        self._num_runs += 1
        self._num_blocks += len(hints)
        return run

    def _cut(self, run: _Run, num_blocks: int) -> _Run:
        """The first so many blocks of it as a run of their own, with what is left of it below."""
        assert run.parent is not None
        above = _Run(run.parent, run.hints[:num_blocks], run.start + num_blocks)
        above.weight, above.num_holders = run.weight, run.num_holders
        # Nobody parted within it so far, so nearly all of them found all of it or none: both parts alike.
        above.answered, above.cached = run.answered, run.cached
        run.parent.children[above.hints[0]] = above
        run.hints = run.hints[num_blocks:]
        run.parent = above
        above.children[run.hints[0]] = run
        self._num_runs += 1
        return above

    def _evict(self) -> None:
        while self._num_runs > self._max_runs or self._num_blocks > self._max_blocks:
            leaf, _ = self._leaves.popitem(last=False)
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.hints[0]]
            self._num_runs -= 1
            self._num_blocks -= len(leaf.hints)
            if not parent.children and parent is not self._root:
                # Not the oldest: prompts may well end there. Its turn comes, unless one does.
                self._leaves[parent] = None

    # --- weights ------------------------------------------------------------------------------

    def _weight_now(self) -> float:
        """What one use weighs: old ones keep their weight, new ones weigh more."""
        half_lives = (self._clock() - self._weighed_from) / self._half_life_s
        if half_lives > _MAX_EXPONENT:
            self._scale(math.exp2(-half_lives))
            self._weighed_from, half_lives = self._clock(), 0.0
        return math.exp2(half_lives)

    def _scale(self, factor: float) -> None:
        """Rare: once in a day of half-lives of five minutes. O(runs)."""
        waiting = [self._root]
        while waiting:
            run = waiting.pop()
            run.weight *= factor
            run.answered *= factor
            run.cached *= factor
            waiting.extend(run.children.values())

    def _per_minute(self) -> float:
        """What a weight means in prompts a minute, for uses that came evenly since following began."""
        age = max(self._clock() - self._since, 1.0) / self._half_life_s
        seconds = self._half_life_s / math.log(2.0) * (1.0 - math.exp2(-age))
        return 60.0 / seconds / self._weight_now()

    def _view(self, run: _Run, parent: int | None, total: float, per_minute: float) -> HotRun:
        if run.name is None:
            last = run.hints[-1].to_bytes(8, "little")
            run.name = hashlib.blake2b(last, key=self._key, digest_size=NAME_BYTES).hexdigest()
        return HotRun(
            name=run.name,
            parent=parent,
            start=run.start,
            end=run.end,
            share=min(1.0, run.weight / total),
            per_minute=run.weight * per_minute,
            hit_ratio=min(1.0, run.cached / run.answered) if run.answered else None,
            num_holders=run.num_holders,
        )


def _weight_of(run: _Run) -> float:
    return run.weight


def _packed(hints: Sequence[HashHint]) -> array[int]:
    """Copied as bytes where they are packed already: a prompt has hundreds."""
    packed = array("Q")
    packed.frombytes(as_words(hints).tobytes())
    return packed


def _shared_blocks(ours: array[int], theirs: Sequence[HashHint], at: int) -> int:
    """Leading blocks of `ours` that are also theirs from `at` on; the first one is known to be. O(log).

    A hint names everything up to its block, so equal at one place means equal before it.
    """
    low, high = 1, min(len(ours), len(theirs) - at)
    if ours[high - 1] == theirs[at + high - 1]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if ours[middle - 1] == theirs[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
