"""Block ids become hashes, tokens and text that share exactly what the ids share."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings

from cache.kv_cache_manager import KVCacheManager
from loadtest.simulation.turns import (
    CHARS_PER_TOKEN,
    TurnHasher,
    TurnTokens,
    fingerprint,
    make_turns,
    name_contents,
)
from loadtest.workloads.request import Workload
from tests.fakes.simulation import BLOCK_TOKENS, request, workload, workloads


def shared_length(left: str, right: str) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


@given(workloads())
@settings(max_examples=60, deadline=None)
def test_equal_ids_are_equal_hashes_and_other_ids_others(work: Workload) -> None:
    turns = make_turns(work)
    hash_of_id: dict[int, bytes] = {}
    for turn in turns:
        full = turn.work.input_tokens // BLOCK_TOKENS
        for block_id, block_hash in zip(turn.work.block_ids[:full], turn.block_hashes, strict=False):
            assert hash_of_id.setdefault(block_id, block_hash) == block_hash
    assert len(set(hash_of_id.values())) == len(hash_of_id)
    # The router sees the low 64 bits only: they differ too.
    assert len({block_hash[:8] for block_hash in hash_of_id.values()}) == len(hash_of_id)


@given(workloads())
@settings(max_examples=60, deadline=None)
def test_every_full_block_of_prompt_and_answer_has_a_hash(work: Workload) -> None:
    for turn in make_turns(work):
        tokens = turn.work.input_tokens + turn.work.output_tokens
        assert len(turn.block_hashes) == tokens // BLOCK_TOKENS
        assert len(set(turn.block_hashes)) == len(turn.block_hashes)


@given(workloads())
@settings(max_examples=60, deadline=None)
def test_a_number_names_a_whole_prefix(work: Workload) -> None:
    """So that a cached block's parents are its own, in answers too."""
    parent_of: dict[int, int | None] = {}
    for chain in name_contents(work).blocks:
        for parent, number in zip([None, *chain], chain, strict=False):
            assert parent_of.setdefault(number, parent) == parent


def test_an_answer_is_what_the_next_turn_says_it_was() -> None:
    """40 tokens and 20 generated: block 2, which the answer fills, is the next prompt's third."""
    first = request(0.0, 40, 20, (0, 1, 2), session=1)
    second = request(1.0, 70, 5, (0, 1, 10, 11, 12), session=1)
    stranger = request(1.0, 70, 5, (0, 1, 20, 21, 22), session=2)
    turns = make_turns(workload(first, second, stranger))
    assert turns[0].block_hashes == turns[1].block_hashes[:3]
    assert turns[0].block_hashes[2] not in turns[2].block_hashes


def test_of_several_answers_the_first_is_gone_on_from() -> None:
    """The others are nobody's: as one text they would take the room of one."""
    asked = request(0.0, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS, (0, 1))
    others = [replace(asked, branch=1), replace(asked, branch=2)]
    later = request(9.0, 5 * BLOCK_TOKENS, 1, (0, 1, 2, 3, 4))
    first, second, third, after, _ = name_contents(
        workload(asked, *others, later, replace(later, branch=1))
    ).blocks
    assert first == after[:4]
    assert second[:2] == third[:2] == first[:2]
    assert len({*first[2:], *second[2:], *third[2:]}) == 6


def test_an_answer_that_the_next_prompt_is_too_short_for_is_nobodys() -> None:
    first = request(0.0, 40, 30, (0, 1, 2), session=1)
    retry = request(1.0, 60, 5, (0, 1, 10, 11), session=1)
    turns = make_turns(workload(first, retry))
    assert turns[0].block_hashes[:2] == turns[1].block_hashes[:2]
    assert not set(turns[0].block_hashes[2:]) & set(turns[1].block_hashes)


def test_text_is_shared_as_far_as_blocks_are() -> None:
    first = request(0.0, 40, 20, (0, 1, 2), session=1)
    second = request(1.0, 70, 5, (0, 1, 10, 11, 12), session=1)
    stranger = request(1.0, 70, 5, (0, 30, 31, 32, 33), session=2)
    one, two, other = (turn.prompt for turn in make_turns(workload(first, second, stranger)))
    assert len(one.text) == 40 * CHARS_PER_TOKEN
    assert two.text.startswith(one.text)  # the partial block too: its text goes on in the answer
    block_chars = BLOCK_TOKENS * CHARS_PER_TOKEN
    assert block_chars <= shared_length(one.text, other.text) < block_chars + 4
    assert one.session == two.session != other.session


def test_the_users_text_starts_behind_what_sessions_share() -> None:
    first = request(0.0, 40, 20, (0, 1, 2), session=1)
    stranger = request(1.0, 70, 5, (0, 30, 31, 32, 33), session=2)
    bare = request(2.0, 16, 5, (0,), session=3)  # nothing but the system prompt
    turns = make_turns(workload(first, stranger, bare))
    assert turns[0].prompt.text == turns[0].prompt.text[: BLOCK_TOKENS * CHARS_PER_TOKEN] + (
        turns[0].prompt.first_user_text
    )
    assert turns[2].prompt.first_user_text == turns[2].prompt.text


def test_production_caches_turns_like_any_other_tokens() -> None:
    first = request(0.0, 40, 20, (0, 1, 2), session=1)
    second = request(1.0, 70, 5, (0, 1, 10, 11, 12), session=1)
    turns = make_turns(workload(first, second))
    cache = KVCacheManager(16, TurnHasher(fingerprint(BLOCK_TOKENS)), block_size=BLOCK_TOKENS)
    tokens = TurnTokens.of(40, turns[0].block_hashes)
    sequence = cache.begin(tokens)
    cache.admit(sequence, cache.match(sequence), 40)
    tokens.extend(array("b", bytes(20)))
    cache.grow(sequence, 59)
    cache.commit_step()
    cache.release(sequence)
    following = cache.begin(TurnTokens.of(70, turns[1].block_hashes))
    assert cache.match(following).num_tokens == 3 * BLOCK_TOKENS


def test_only_its_own_tokens_are_hashed() -> None:
    hasher = TurnHasher(fingerprint(BLOCK_TOKENS))
    with pytest.raises(AssertionError, match="its own tokens"):
        hasher.extend(hasher.root(), array("i", range(BLOCK_TOKENS)), 0, 1)
