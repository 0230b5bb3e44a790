"""A thread that looks again and again goes on looking, whatever a look runs into."""

from __future__ import annotations

import logging
import threading

import pytest

from replica.polling import Poller


def test_a_look_that_fails_is_told_once_and_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    """A watchdog that a passing failure ended would watch nothing, and nobody would know."""
    looks, enough = [0], threading.Event()

    def look() -> None:
        looks[0] += 1
        if looks[0] == 4:
            enough.set()
        if looks[0] < 4:
            raise OSError("a passing failure")

    poller = Poller("warmpath-test", 0.001, look)
    with caplog.at_level(logging.ERROR):
        poller.start()
        assert enough.wait(20)
        poller.close()
    assert [record.message for record in caplog.records] == [
        "a look failed; the next one is taken all the same"
    ]
    assert caplog.records[0].__dict__["thread_name"] == "warmpath-test"
    assert caplog.records[0].exc_info is not None


def test_a_look_may_end_it() -> None:
    closed = threading.Event()

    def look() -> None:
        poller.close()
        closed.set()

    poller = Poller("warmpath-test", 0.001, look)
    poller.start()
    assert closed.wait(20)
    poller.close()
