"""A request's body that is here, in whole or in part, before anybody has asked for it."""

from __future__ import annotations

from starlette.types import Message, Receive


def with_body(content: bytes, receive: Receive) -> Receive:
    """`receive` as applications know it: the first message is the whole body, what follows is `receive`'s."""
    return _after({"type": "http.request", "body": content, "more_body": False}, receive)


def with_beginning(content: bytes, receive: Receive) -> Receive:
    """The same where `content` is no more than what has come: `receive` has the rest."""
    return _after({"type": "http.request", "body": content, "more_body": True}, receive)


def _after(first: Message, receive: Receive) -> Receive:
    unread = [first]

    async def receive_all() -> Message:
        return unread.pop() if unread else await receive()

    return receive_all
