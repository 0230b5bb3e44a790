"""The fleet on paper: as many blocks as asked for, and prompts that are held as far as they say."""

from __future__ import annotations

import pytest

from benchmarks.router_workload import BLOCK_SIZE, NEW_BLOCKS, SYSTEM_BLOCKS, Fleet, Hit, as_text
from cache.block_hash import BlockHasher
from cache.fingerprint import Fingerprint, HashAlgorithm

FLEET = Fleet(num_replicas=2, num_blocks=6000)
HASHER = BlockHasher(Fingerprint("paper", "0", "f", "", BLOCK_SIZE, HashAlgorithm.XXH3_128))


@pytest.fixture(scope="module")
def held() -> set[bytes]:
    root = HASHER.root()
    return {block for _, tokens in FLEET.conversations() for block in HASHER.chain(root, tokens)}


def test_a_fleet_holds_about_as_many_distinct_blocks_as_asked_for(held: set[bytes]) -> None:
    assert 6000 <= len(held) < 6000 + 2048
    assert {replica for replica, _ in FLEET.conversations()} == {0, 1}


def test_conversations_begin_alike_and_are_the_same_every_time() -> None:
    first, second = FLEET.conversation(0), FLEET.conversation(3)
    assert first[: SYSTEM_BLOCKS * BLOCK_SIZE] == second[: SYSTEM_BLOCKS * BLOCK_SIZE]
    assert first[SYSTEM_BLOCKS * BLOCK_SIZE] != second[SYSTEM_BLOCKS * BLOCK_SIZE]
    assert first == Fleet(2, 6000).conversation(0)


@pytest.mark.parametrize("num_blocks", [64, 512, 2048])
@pytest.mark.parametrize("hit", list(Hit))
def test_a_prompt_is_held_as_far_as_it_says(held: set[bytes], num_blocks: int, hit: Hit) -> None:
    wanted = {Hit.NONE: 0, Hit.HALF: num_blocks // 2, Hit.ALL: num_blocks}[hit]
    for number in range(3):
        tokens = FLEET.prompt(num_blocks, hit, number)
        chain = HASHER.chain(HASHER.root(), tokens)
        assert len(chain) == num_blocks
        assert len(tokens) % BLOCK_SIZE, "something is left to compute"
        assert [block in held for block in chain] == [True] * wanted + [False] * (num_blocks - wanted)


def test_a_next_turn_goes_on_from_the_last_one() -> None:
    last, turn = FLEET.turns(512, 1)
    assert turn[: len(last)] == last
    assert len(turn) - len(last) == NEW_BLOCKS * BLOCK_SIZE


def test_text_has_four_characters_a_token() -> None:
    tokens = FLEET.prompt(64, Hit.NONE, 0)
    assert len(as_text(tokens)) == 4 * len(tokens)
