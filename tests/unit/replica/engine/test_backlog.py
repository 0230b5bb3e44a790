"""What piles up says what its deltas said, and takes little more than that."""

from __future__ import annotations

import tracemalloc
from array import array

from hypothesis import given
from hypothesis import strategies as st

from cache.messages import Delta, FinishReason, Logprobs
from replica.engine.backlog import MAX_DELTA_BYTES, Backlog, size_bytes

NUM_TOP = 2
Token = tuple[int, float]


def logprobs(token_ids: list[int], num_top: int = NUM_TOP) -> Logprobs:
    top_ids = [token_id + place for token_id in token_ids for place in range(num_top)]
    return Logprobs(
        num_top,
        array("f", [-float(token_id) for token_id in token_ids]),
        array("i", top_ids),
        array("f", [-float(each) for each in top_ids]),
    )


@st.composite
def deltas(draw: st.DrawFn) -> list[Delta]:
    """Of one answer, some without tokens, all with logprobs or none."""
    has_logprobs = draw(st.booleans())
    parts = draw(
        st.lists(st.tuples(st.text(max_size=3), st.lists(st.integers(0, 2**20), max_size=3)), min_size=1)
    )
    last = draw(st.sampled_from([None, *FinishReason]))
    return [
        Delta(
            text,
            tuple(token_ids),
            cached_tokens=16,
            finish_reason=last if place == len(parts) - 1 else None,
            logprobs=logprobs(token_ids) if has_logprobs and token_ids else None,
            prompt_logprobs=logprobs([7]) if has_logprobs and not place else None,
            choice=3,
        )
        for place, (text, token_ids) in enumerate(parts)
    ]


def backlog(parts: list[Delta]) -> Backlog:
    piled = Backlog(parts[0])
    for part in parts[1:]:
        piled.add(part)
    return piled


@given(deltas())
def test_one_delta_says_what_all_of_them_say(parts: list[Delta]) -> None:
    found = [part.logprobs for part in parts if part.logprobs is not None]
    assert backlog(parts).delta() == Delta(
        text="".join(part.text for part in parts),
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        cached_tokens=16,
        finish_reason=parts[-1].finish_reason,
        logprobs=Logprobs.joined(found),
        prompt_logprobs=parts[0].prompt_logprobs,
        choice=3,
    )


@given(deltas())
def test_deltas_are_left_as_they_are(parts: list[Delta]) -> None:
    """Others may hold them."""
    before = repr(parts)
    backlog(parts)
    assert repr(parts) == before


@given(deltas())
def test_its_size_is_the_sum_of_theirs_without_the_prompts(parts: list[Delta]) -> None:
    numbers = [len(part.logprobs) * (1 + 2 * NUM_TOP) for part in parts if part.logprobs is not None]
    num_tokens = sum(len(part.token_ids) for part in parts)
    text = "".join(part.text for part in parts)
    assert backlog(parts).num_bytes == len(text.encode()) + 4 * (num_tokens + sum(numbers))


def test_an_unread_token_takes_the_bytes_of_what_is_said_of_it() -> None:
    """With twenty log probabilities it took 719; each step's delta was kept as it came."""
    num_tokens = 2000

    def token(place: int) -> Delta:
        return Delta(" word", (place,), 0, logprobs=logprobs([place], 20))

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        piled = backlog([token(0)])
        for place in range(1, num_tokens):
            piled.add(token(place))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken < 1.2 * piled.num_bytes
    assert piled.num_bytes == num_tokens * (len(" word") + 4 + 4 * 41)


def test_it_is_full_at_its_limit() -> None:
    one = Delta("x" * MAX_DELTA_BYTES, (), 0)
    assert size_bytes(one) == MAX_DELTA_BYTES
    assert Backlog(one).is_full
    assert not Backlog(Delta("x" * (MAX_DELTA_BYTES - 1), (), 0)).is_full
