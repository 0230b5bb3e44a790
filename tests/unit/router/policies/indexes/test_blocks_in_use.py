"""Blocks of the prompts in flight, per replica."""

from __future__ import annotations

import random

from cache.types import HashHint, ReplicaId, RequestId
from router.policies.indexes.blocks_in_use import BlocksInUse
from tests.fakes.router import hint_chain

A, B = ReplicaId("a"), ReplicaId("b")
DOC = hint_chain("doc", 6)


def in_use() -> BlocksInUse:
    made = BlocksInUse()
    made.add(A)
    made.add(B)
    return made


def test_a_request_is_at_one_replica_at_a_time() -> None:
    blocks = in_use()
    blocks.begin(RequestId("r"), A, DOC)
    blocks.begin(RequestId("r"), B, DOC)
    assert (blocks.with_prompt(A, ()), blocks.with_prompt(B, ())) == (0, 6)
    blocks.end(RequestId("r"))
    blocks.end(RequestId("r"))
    assert blocks.with_prompt(B, ()) == 0


def test_nothing_is_kept_of_unknown_replicas() -> None:
    blocks = in_use()
    blocks.begin(RequestId("r"), ReplicaId("stranger"), DOC)
    assert blocks.with_prompt(ReplicaId("stranger"), DOC) == 6
    blocks.begin(RequestId("r"), A, DOC)
    blocks.remove(A)
    blocks.end(RequestId("r"))
    blocks.add(A)
    assert blocks.with_prompt(A, ()) == 0


def test_counts_what_a_set_of_all_blocks_would() -> None:
    rng = random.Random(5)
    blocks, in_flight = in_use(), {}
    for step in range(2_000):
        request_id = RequestId(str(rng.randrange(30)))
        if rng.random() < 0.4:
            blocks.end(request_id)
            in_flight.pop(request_id, None)
        else:
            replica_id, chain = rng.choice((A, B)), some_chain(rng)
            blocks.begin(request_id, replica_id, chain)
            in_flight[request_id] = replica_id, chain
        asked = some_chain(rng)
        for replica_id in (A, B):
            taken = [set(chain) for holder, chain in in_flight.values() if holder == replica_id]
            assert blocks.with_prompt(replica_id, asked) == len(set(asked).union(*taken)), step


def some_chain(rng: random.Random) -> list[HashHint]:
    """A document's beginning, and from there on something else: a block names all before it."""
    shared = rng.randrange(7)
    return [*DOC[:shared], *hint_chain(f"from {shared}, {rng.randrange(3)}", rng.randrange(5))]
