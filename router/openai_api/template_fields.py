"""What a body tells its chat template, beside messages and tools: the template's own variables.

Knows the fields and their bounds; knows neither templates nor tokens. Which names a template may be given,
`PromptEncoder` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema
from pydantic_core import to_json

from router.errors import InvalidField, UnsupportedParameter
from router.openai_api.checked import limits_of
from router.openai_api.fields import Endpoint, accepted_text
from router.prompts.prompt import PromptEncoder

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")  # the API's
_VARIABLES, _EFFORT = "chat_template_kwargs", "reasoning_effort"


def _to_variables(value: object, info: ValidationInfo) -> dict[str, Any]:
    limit = limits_of(info).max_template_bytes
    if not isinstance(value, dict):
        raise InvalidField(_VARIABLES, f"'{_VARIABLES}' must be {accepted_text(Endpoint.CHAT, _VARIABLES)}.")
    if len(to_json(value)) > limit:
        raise InvalidField(_VARIABLES, f"'{_VARIABLES}' must have at most {limit} bytes as JSON.")
    return value


def _to_effort(value: object) -> str:
    if not isinstance(value, str) or value not in _EFFORTS:
        raise InvalidField(_EFFORT, f"'{_EFFORT}' must be {accepted_text(Endpoint.CHAT, _EFFORT)}.")
    return value


_OF_CHATS = ("tools", _VARIABLES, _EFFORT)


def check_has_chat(body: Mapping[str, Any], has_messages: bool) -> None:
    """Raises InvalidField for what only a chat's template could read, where there is a text instead."""
    for name in _OF_CHATS:
        if body.get(name) and not has_messages:
            raise InvalidField(name, f"'{name}' is only allowed with 'messages'.")


class TemplateFields(BaseModel):
    """Of every body that has a chat."""

    model_config = ConfigDict(strict=True, frozen=True)

    chat_template_kwargs: Annotated[
        dict[str, Any], BeforeValidator(_to_variables), WithJsonSchema({"type": "object"})
    ] = Field(default_factory=dict)
    reasoning_effort: (
        Annotated[str, BeforeValidator(_to_effort), WithJsonSchema({"enum": list(_EFFORTS)})] | None
    ) = None

    def template_variables(self, encoder: PromptEncoder, *, has_tools: bool) -> dict[str, Any]:
        """Of the template that renders the chat.

        Raises UnsupportedParameter for an effort that the template would not look at, and InvalidField where
        the two fields say different ones.
        """
        effort, variables = self.reasoning_effort, self.chat_template_kwargs
        if effort is None:
            return variables
        if not encoder.names_variable(_EFFORT, has_tools=has_tools):
            raise UnsupportedParameter(
                _EFFORT,
                f"'{_EFFORT}' is not supported: this model's chat template has no variable of that name. "
                f"Leave it out; '{_VARIABLES}' takes the variables that the template has.",
            )
        if variables.get(_EFFORT, effort) != effort:
            raise InvalidField(
                _EFFORT, f"'{_EFFORT}' must be the same as '{_VARIABLES}.{_EFFORT}' where both are set."
            )
        return {**variables, _EFFORT: effort}
