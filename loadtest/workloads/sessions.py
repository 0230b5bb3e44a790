"""Which requests of a trace belong together, and which blocks belong to everybody.

Published traces name blocks, not conversations. Requests that share a chain are one session, unless all
they share is a system prompt: the *head*, blocks that many unrelated continuations follow.
Knows chains of block ids; knows neither files nor times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

# A conversation also branches (retries, edits), but a few times; a system prompt as often as it has users.
MIN_HEAD_BRANCHES = 8
MIN_HEAD_SHARE = 0.01  # of all requests; the busiest conversation of the Mooncake trace has 0.0036


def shared_head(chains: Sequence[Sequence[int]]) -> frozenset[int]:
    """Blocks that lead up to a point where many different prompts part.

    A block is of the head if at least `MIN_HEAD_SHARE` of all requests (and `MIN_HEAD_BRANCHES` requests)
    hold it, and it is followed, at once or further on, by a block with `MIN_HEAD_BRANCHES` or more
    different followers. O(blocks).
    """
    uses: Counter[int] = Counter()
    parents: dict[int, int | None] = {}
    for chain in chains:
        uses.update(chain)
        parents.update(zip(chain, (None, *chain), strict=False))
    num_followers = Counter(parent for parent in parents.values() if parent is not None)
    at_least = max(MIN_HEAD_BRANCHES, MIN_HEAD_SHARE * len(chains))
    head: set[int] = set()
    for block, branches in num_followers.items():
        if branches < MIN_HEAD_BRANCHES or uses[block] < at_least:
            continue
        ancestor: int | None = block  # used at least as often as what follows it
        while ancestor is not None and ancestor not in head:
            head.add(ancestor)
            ancestor = parents[ancestor]
    return frozenset(head)


def find_sessions(chains: Sequence[Sequence[int]], head: frozenset[int]) -> list[int]:
    """One number per chain, from 0 in order of first sight: equal if they share a block beyond the head.

    A chain with nothing beyond the head is a session of its own. O(chains + head).
    """
    session_of: dict[int, int] = {}
    sessions: list[int] = []
    num_sessions = 0
    for chain in chains:
        # Chains that share any block share all before it, so the first one beyond the head decides.
        own = next((block for block in chain if block not in head), None)
        session = session_of.get(own) if own is not None else None
        if session is None:
            session = num_sessions
            num_sessions += 1
            if own is not None:
                session_of[own] = session
        sessions.append(session)
    return sessions
