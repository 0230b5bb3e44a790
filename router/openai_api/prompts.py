"""The prompts of a completions body as checked values: texts, or token ids.

Knows the API's four forms of them; knows no vocabulary, and so not which ids there are.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationInfo

from cache.counted import counted
from router.errors import InvalidField
from router.openai_api.checked import limits_of
from router.openai_api.fields import Endpoint, accepted_text

INT32_MAX = (1 << 31) - 1


class TextPrompt(BaseModel):
    model_config = ConfigDict(frozen=True)

    text: str


class TokenPrompt(BaseModel):
    model_config = ConfigDict(frozen=True)

    token_ids: tuple[int, ...]


Prompt = TextPrompt | TokenPrompt


def to_prompts(value: object, info: ValidationInfo) -> tuple[Prompt, ...]:
    """One string, one list of ids, or a list of either; the kind of the first item decides."""
    if isinstance(value, str):
        return (TextPrompt.model_construct(text=value),)
    if isinstance(value, list) and value:
        if is_int(value[0]):
            return (_to_token_prompt(value, "prompt"),)
        limit = limits_of(info).max_prompts
        if len(value) > limit:
            raise InvalidField(
                "prompt", f"'prompt' must have at most {counted(limit, 'prompt')}, this one has {len(value)}."
            )
        return tuple(_to_prompt(item, f"prompt[{index}]") for index, item in enumerate(value))
    raise InvalidField("prompt", f"'prompt' must be {accepted_text(Endpoint.COMPLETIONS, 'prompt')}.")


def _to_prompt(value: object, at: str) -> Prompt:
    if isinstance(value, str):
        return TextPrompt.model_construct(text=value)
    return _to_token_prompt(value, at)


def _to_token_prompt(value: object, at: str) -> TokenPrompt:
    if not isinstance(value, list) or not value or not all(map(is_token_id, value)):
        raise InvalidField(at, f"'{at}' must be a string or a non-empty list of token ids.")
    return TokenPrompt.model_construct(token_ids=tuple(value))


def is_int(value: object) -> bool:
    """Whether JSON says an integer; `true` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_token_id(value: object) -> bool:
    """Whether some vocabulary could have it."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT32_MAX


IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}
PROMPTS_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        IDS_SCHEMA,
        {"type": "array", "items": {"anyOf": [{"type": "string"}, IDS_SCHEMA]}},
    ]
}
