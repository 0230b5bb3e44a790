"""What keeps a client from measuring at all. What one request met is no exception: `answer.Failure`.

ClientError
├── Unreachable      nobody answers at that address, or not as an OpenAI-compatible server does
├── KeyNeeded        the server wants an API key, or another one
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


class EventTooLong(ClientError):
    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"one server-sent event is longer than {limit:,} bytes")


class NotAChunk(ClientError):
    pass
