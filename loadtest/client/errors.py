"""What keeps a client from measuring at all. What one request met is no exception: `answer.Failure`.

ClientError
├── Unreachable      nobody answers at that address, or not as an OpenAI-compatible server does
├── KeyNeeded        the server wants an API key, or another one
└── EventTooLong     a stream sends one event without end
"""

from __future__ import annotations


class ClientError(Exception):
    """The message says what is wrong and what to do."""


class Unreachable(ClientError):
    def __init__(self, url: str, problem: str) -> None:
        self.url = url
        super().__init__(f"no OpenAI-compatible server answers at {url}: {problem}")


class KeyNeeded(ClientError):
    def __init__(self, url: str, variable: str) -> None:
        self.url = url
        super().__init__(f"{url} wants an API key: give --key, or set {variable}")


class EventTooLong(ClientError):
    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"one server-sent event is longer than {limit:,} bytes")
