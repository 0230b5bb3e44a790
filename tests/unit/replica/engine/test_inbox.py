"""What is posted comes out in order, and nothing after the end."""

from __future__ import annotations

import threading

from replica.engine.inbox import Drain, HandOver, Inbox, Stop


def opened() -> Inbox:
    inbox = Inbox()
    inbox.open()
    return inbox


def test_messages_come_in_order_with_those_posted_meanwhile() -> None:
    inbox, taken = opened(), []
    inbox.post(Drain())
    for message in inbox.take(0.0):
        if not taken:
            inbox.post(HandOver())
        taken.append(message)
    assert taken == [Drain(), HandOver()]
    assert list(inbox.take(0.0)) == []


def test_what_is_left_when_taking_stops_comes_the_next_time() -> None:
    inbox = opened()
    inbox.post(Drain())
    inbox.post(HandOver())
    assert next(inbox.take(0.0)) == Drain()
    assert list(inbox.take(0.0)) == [HandOver()]


def test_the_first_message_is_waited_for() -> None:
    inbox = opened()
    poster = threading.Timer(0.01, inbox.post, [Drain()])
    poster.start()
    assert list(inbox.take(30.0)) == [Drain()]
    poster.join()


def test_nothing_is_taken_before_it_is_open_or_after_it_was_closed() -> None:
    inbox = Inbox()
    assert not inbox.post(Drain())
    assert inbox.why_closed == "it was not started"
    inbox.open()
    assert inbox.post(Drain())
    assert inbox.close("it was closed") == "it was closed"
    assert not inbox.post(HandOver())
    assert inbox.close("its thread has died") == inbox.why_closed == "it was closed"
    assert list(inbox.take(0.0)) == [Drain(), Stop()]
