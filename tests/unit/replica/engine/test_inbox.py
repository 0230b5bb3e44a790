"""What is posted comes out in order, ends before work, and nothing after the end."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from hypothesis import given
from hypothesis import strategies as st

from replica.engine.inbox import AskPins, Cancel, Drain, HandOver, Inbox, Message, Stop, Submit
from replica.engine.stream import DeltaStream
from tests.fakes.engine import make_request


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


class Client:
    """Who asks for something, and leaves."""

    def __init__(self) -> None:
        # No loop: nothing is handed over here.
        self.stream = DeltaStream(None)  # type: ignore[arg-type]
        self.submit = Submit(make_request("r", range(8)), self.stream, 0.0, None)
        self.cancel = Cancel(self.stream)


def test_who_leaves_does_not_stand_behind_those_that_come() -> None:
    inbox, [gone, *others] = opened(), [Client() for _ in range(4)]
    inbox.post(gone.submit)
    assert list(inbox.take(0.0)) == [gone.submit]
    question = AskPins(lambda _: None, Future())
    for message in (*[each.submit for each in others], question, gone.cancel, Drain()):
        inbox.post(message)
    assert list(inbox.take(0.0)) == [gone.cancel, Drain(), *[each.submit for each in others], question]


def test_nothing_is_waited_for_while_something_is_left() -> None:
    """An engine that has work asks whether there is anything; one that has none would wait."""
    inbox = opened()
    for left in (HandOver(), Client().submit):
        inbox.post(Drain())
        inbox.post(left)
        assert next(inbox.take(0.0)) == Drain()
        assert not inbox.is_empty
        assert list(inbox.take(600.0)) == [left]


def test_who_leaves_before_it_was_taken_is_not_taken() -> None:
    inbox, first, gone, last = opened(), Client(), Client(), Client()
    for each in (first, gone, last):
        inbox.post(each.submit)
    assert next(inbox.take(0.0)) is first.submit
    assert inbox.withdraw(first.stream) is None
    assert inbox.withdraw(gone.stream) is gone.submit
    assert inbox.withdraw(gone.stream) is None
    assert list(inbox.take(0.0)) == [last.submit]
    assert inbox.is_empty


@given(st.lists(st.sampled_from(("submit", "cancel", "ask", "take", "take")), max_size=40))
def test_nothing_is_lost_or_taken_twice_however_little_is_taken_at_a_time(acts: list[str]) -> None:
    inbox, clients = opened(), list[Client]()
    posted, taken, withdrawn = list[Message](), list[Message](), list[Message]()

    def take(message: Message) -> None:
        taken.append(message)
        if isinstance(message, Cancel) and (submit := inbox.withdraw(message.stream)) is not None:
            withdrawn.append(submit)

    def post(message: Message) -> None:
        posted.append(message)
        inbox.post(message)

    for act in acts:
        match act:
            case "submit":
                clients.append(Client())
                post(clients[-1].submit)
            case "cancel" if clients:
                post(clients.pop(len(clients) // 2).cancel)
            case "ask":
                post(AskPins(lambda _: None, Future()))
            case "take":
                for message in inbox.take(0.0):
                    take(message)
                    break
    for message in inbox.take(0.0):
        take(message)
    assert inbox.is_empty
    work = [each for each in posted if not isinstance(each, Cancel) and each not in withdrawn]
    assert [each for each in taken if not isinstance(each, Cancel)] == work
    assert [each for each in taken if isinstance(each, Cancel)] == [
        each for each in posted if isinstance(each, Cancel)
    ]


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
