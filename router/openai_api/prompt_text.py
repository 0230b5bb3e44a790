"""A request's prompt as text, for placement policies that go by it: what the client wrote, nothing rendered.

Holds on to the parsed body and joins it when asked; most policies never ask. Knows the body's types; knows
neither templates nor policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.openai_api.messages import ChatMessage
from router.policies import PromptView


@dataclass(frozen=True, slots=True)
class ChatText:
    """A chat: its messages' contents, one after another. Roles take no part, as in the routers it serves."""

    messages: Sequence[ChatMessage]
    session: str | None = None

    @property
    def text(self) -> str:
        return "\n".join([message.content or "" for message in self.messages])

    @property
    def first_user_text(self) -> str:
        """What the user said first; everything there is if no message is the user's."""
        return next((message.content or "" for message in self.messages if message.role == "user"), self.text)


@dataclass(frozen=True, slots=True)
class PlainText:
    """A completion's prompt; "" if it came as token ids."""

    text: str
    session: str | None = None

    @property
    def first_user_text(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class SaltedText:
    """A prompt among those of its salt alone: policies that keep texts or sessions meet no others'."""

    view: PromptView
    salt: str  # not empty

    @property
    def text(self) -> str:
        return f"{self.salt}\n{self.view.text}"

    @property
    def first_user_text(self) -> str:
        return f"{self.salt}\n{self.view.first_user_text}"

    @property
    def session(self) -> str | None:
        return None if self.view.session is None else f"{self.salt}\n{self.view.session}"
