"""One event of a streamed answer, as OpenAI's API has it: what is read of it, and of which types.

Servers send more than this, which is left aside. What they send of this in another type is no chunk:
whoever reads it need not ask again. Knows JSON; knows neither streams nor times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from loadtest.client.errors import NotAChunk

Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class CachedTokens:
    cached_tokens: Count | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: CachedTokens | None = None

    @property
    def cached_tokens(self) -> int | None:
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


@dataclass(frozen=True, slots=True)
class Function:
    arguments: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    function: Function | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name of it
    tool_calls: tuple[ToolCall, ...] | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    index: int = 0
    delta: Delta | None = None  # a chat's
    text: str | None = None  # a completion's
    finish_reason: str | None = None

    @property
    def said(self) -> str:
        """Text of a chat's or a completion's chunk; a tool call's arguments are what the model said, too."""
        if self.delta is None:
            return self.text or ""
        calls = [call.function.arguments for call in self.delta.tool_calls or () if call.function is not None]
        thought = self.delta.reasoning_content or self.delta.reasoning  # one of them, where both are sent
        parts = (self.delta.content, thought, *calls)
        return "".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Chunk:
    choices: tuple[Choice, ...] | None = None
    usage: Usage | None = None
    error: Any = None  # in place of the others, whatever it is


_DECODER = msgspec.json.Decoder(Chunk)


def read_chunk(data: bytes) -> Chunk:
    """Raises NotAChunk."""
    try:
        return _DECODER.decode(data)
    except msgspec.ValidationError as error:
        raise NotAChunk(f"an event is no chunk: {error}") from None
    # Text that is no UTF-8, and brackets without end, have errors of their own.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotAChunk(f"an event is not JSON: {error}") from None
