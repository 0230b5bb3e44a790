"""A request's body that is here before anybody has asked for it."""

from __future__ import annotations

from starlette.types import Message, Receive


def with_body(content: bytes, receive: Receive) -> Receive:
    """`receive` as applications know it: the first message is the whole body, what follows is `receive`'s."""
    unread = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive_all() -> Message:
        return unread.pop() if unread else await receive()

    return receive_all
