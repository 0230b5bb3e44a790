"""Predictions, case by case; as part of the index their law is in `tests/property/test_hash_trie.py`."""

from __future__ import annotations

from router.index.predictions import LEAVING_PER_CALL, Predictions
from tests.fakes.router import hint_chain


def test_predictions_end_in_the_order_of_their_last_renewal() -> None:
    predictions, one, two = Predictions(1000), hint_chain("one", 5), hint_chain("two", 5)
    predictions.predict(0, one, 5.0)
    predictions.predict(0, two, 6.0)
    predictions.predict(0, one, 7.0)
    predictions.expire(6.0)
    assert predictions.match(two, 1) == []
    assert predictions.match(one, 1) == [(5, 1)]
    assert list(predictions.lasts(0)) == [one[-1]]


def test_ending_one_leaves_what_others_cover() -> None:
    predictions, chain = Predictions(1000), hint_chain("p", 8)
    predictions.predict(0, chain, 5.0)
    predictions.predict(0, chain[:3], 5.0)
    predictions.predict(1, chain[:6], 5.0)
    predictions.end(0, chain[-1])
    assert predictions.match(chain, 0b11) == [(3, 0b01), (6, 0b10)]
    assert not predictions.has(0, chain[-1])
    assert predictions.has(0, chain[2])


def test_the_oldest_give_way_to_the_newest() -> None:
    predictions = Predictions(max_blocks=100)
    chains = [hint_chain(str(index), 30) for index in range(5)]
    for chain in chains:
        predictions.predict(0, chain, 5.0)
    assert [bool(predictions.match(chain, 1)) for chain in chains] == [False, False, True, True, True]


def test_who_has_gone_is_let_go_little_by_little() -> None:
    predictions = Predictions(1 << 20)
    count = 3 * LEAVING_PER_CALL
    for index in range(count):
        predictions.predict(0, hint_chain(str(index), 2), 5.0)
    predictions.predict(1, hint_chain("0", 2), 5.0)
    empty = Predictions(1).num_bytes()
    predictions.forget(0)
    assert not predictions.is_clear_of(0)
    predictions.expire(0.0)
    predictions.expire(0.0)
    assert predictions.is_clear_of(0)
    assert predictions.match(hint_chain("0", 2), 0b10) == [(2, 0b10)]
    predictions.expire(5.0)
    assert predictions.num_bytes() == empty


def test_somebody_without_predictions_is_clear_at_once() -> None:
    predictions = Predictions(10)
    predictions.forget(3)
    assert predictions.is_clear_of(3)
    assert list(predictions.lasts(3)) == []
