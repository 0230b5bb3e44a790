"""What a rank other than 0 says before it meets the others."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest

from replica.attention import kv_pages
from replica.config import ReplicaConfig
from replica.models.model_source import NotEnoughMemory
from replica.parallel import orders
from replica.parallel.orders import Close, Load, Refused
from replica.runners import rank_model
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
