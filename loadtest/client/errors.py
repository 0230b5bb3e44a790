"""What keeps a client from measuring at all. What one request met is no exception: `answer.Failure`.

ClientError
├── Unreachable      nobody answers at that address, or not as an OpenAI-compatible server does
├── KeyNeeded        the server wants an API key, or another one
├── BadKey           an API key that no header can carry
├── EventTooLong     a stream sends one event without end
└── NotAChunk        a stream sends an event that is no part of an answer
"""

from __future__ import annotations


class ClientError(Exception):
    """The message says what is wrong and what to do."""


class Unreachable(ClientError):
    def __init__(self, url: str, problem: str) -> None:
        self.url = url
        super().__init__(f"no OpenAI-compatible server answers at {url}: {problem}")


class KeyNeeded(ClientError):
    def __init__(self, url: str, variable: str, *, had_one: bool) -> None:
        """had_one: it was sent one, and did not like it."""
        self.url = url
        super().__init__(
            f"{url} wants {'another' if had_one else 'an'} API key: set {variable}, or give it by the "
            "command's own option where it has one (--key; locust's is --api-key)"
        )


class BadKey(ClientError):
    """Says nothing of the key itself: messages are kept in logs."""

    def __init__(self, variable: str) -> None:
        super().__init__(
            f"the API key ({variable}, or the command's own option) cannot be sent: it has a line end, a "
            "space before or after it, or a character that is not ASCII"
        )


class EventTooLong(ClientError):
    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"one server-sent event is longer than {limit:,} bytes")


class NotAChunk(ClientError):
    pass
