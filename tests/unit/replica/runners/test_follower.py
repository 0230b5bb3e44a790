"""What a rank other than 0 says, and when it meets the others."""

from __future__ import annotations

import io
import logging
import os
from collections import deque
from typing import Any

import pytest

from replica.attention import kv_pages
from replica.config import ReplicaConfig
from replica.errors import CollectiveFailed
from replica.models.model_source import NotEnoughMemory
from replica.parallel import orders
from replica.parallel.orders import Answer, Close, Load, Loaded, Meet, Order, Refused
from replica.runners import follower, rank_model
from replica.runners.follower import Follower, Orders

GIB = 1 << 30


def test_a_card_without_room_for_its_part_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 looks at its own card alone. Later it would wait in a collective for a rank that has ended."""

    def load_whole(*_: Any) -> Any:
        raise AssertionError("gigabytes were read for nothing")

    monkeypatch.setattr(rank_model, "load_whole", load_whole)
    monkeypatch.setattr(kv_pages, "free_bytes", lambda device: {"cuda:1": 3 * GIB}[str(device)])
    config = ReplicaConfig(model="tiny", device="cuda", tensor_parallel=2)
    answers = io.BytesIO()
    # Open until it has told: at its end it would end its process, and after Close it tells nothing.
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as order_stream, os.fdopen(writing, "wb") as rank_0:
        rank_0.write(orders.framed(Load(config, 1, "store", 512, "bfloat16", part_bytes=8 * GIB)))
        rank_0.flush()
        with pytest.raises(NotEnoughMemory):
            Follower(Orders(order_stream), answers).run()
        rank_0.write(orders.framed(Close()))
    answers.seek(0)
    answer = orders.read(answers, orders.answers)
    assert isinstance(answer, Refused)
    told = "needs 8.0 GiB of memory on cuda:1 for its weights, cut into 2 parts, 3.0 GiB are free"
    assert told in answer.reason
    assert orders.read(answers, orders.answers) is None


class Said(Orders):
    """These orders, without anybody whose end would be this process's."""

    def __init__(self, *said: Order) -> None:
        self._said = deque(said)
        self._is_over = False
        self.is_waited_for = False

    def next(self) -> Order:
        order = self._said.popleft()
        self._is_over = isinstance(order, Close)
        return order

    @property
    def are_over(self) -> bool:
        return self._is_over

    def wait_for_end(self) -> None:
        self.is_waited_for = True


def answers_to(said: Said) -> list[Answer]:
    stream = io.BytesIO()
    Follower(said, stream).run()
    stream.seek(0)
    answers = []
    while (answer := orders.read(stream, orders.answers)) is not None:
        answers.append(answer)
    return answers


LOAD = Load(
    ReplicaConfig(model="tiny", device="cpu", tensor_parallel=3), 1, "store", 512, "float32", part_bytes=1
)


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that wanted to meet others, who never came."""
    begun: list[int] = []

    def meet(rank: int, *_: Any) -> Any:
        begun.append(rank)
        raise CollectiveFailed(rank, "wait timeout after 600000ms", 600.0)

    monkeypatch.setattr(rank_model, "load_whole", lambda *_: None)
    monkeypatch.setattr(follower, "RankGroup", meet)
    return begun


def test_a_rank_meets_the_others_when_it_is_told_that_all_have_loaded(meetings: list[int]) -> None:
    """A meeting has a limit, and one that began earlier ended while another rank, or rank 0, still loaded."""
    assert answers_to(Said(LOAD, Close())) == [Loaded()]
    assert meetings == []


def test_a_rank_to_whom_nobody_comes_is_not_the_cause(
    meetings: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """It was told as what refuses: rank 0 named a rank that could serve its part."""
    said = Said(LOAD, Meet())
    assert answers_to(said) == [Loaded()]
    assert meetings == [1]
    assert said.is_waited_for
    [line] = caplog.records
    assert line.levelno == logging.WARNING
    assert "wait timeout after 600000ms" in line.getMessage(), "nobody else tells of it"
