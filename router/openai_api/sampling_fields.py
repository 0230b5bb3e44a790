"""The fields that change or tell a token's probability, as checked values.

Knows their ranges; knows neither tokenizer nor endpoints (the two spell log probabilities differently).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema

from router.errors import InvalidField
from router.openai_api.checked import limits_of
from router.openai_api.prompts import INT32_MAX, is_int
from router.sampling import MinP, Penalty, RepetitionPenalty

MAX_BIAS = 100  # the API's: enough to forbid a token, or to have nothing else
MAX_LOGPROBS = 20  # the API's, for chats; the limit may be less
_BIAS_TEXT = f"an object of token ids with a number between -{MAX_BIAS} and {MAX_BIAS} each"


def _to_biases(value: object, info: ValidationInfo) -> tuple[tuple[int, float], ...]:
    limit = limits_of(info).max_logit_bias
    if isinstance(value, dict) and len(value) > limit:
        raise InvalidField("logit_bias", f"'logit_bias' must have at most {limit} token ids.")
    if not isinstance(value, dict) or not all(
        _is_token(token) and _is_bias(bias) for token, bias in value.items()
    ):
        raise InvalidField("logit_bias", f"'logit_bias' must be {_BIAS_TEXT}.")
    return tuple(sorted((int(token), float(bias)) for token, bias in value.items()))


def _is_token(value: object) -> bool:
    """JSON's keys are strings. One spelling per id, so that none is there twice."""
    return (
        isinstance(value, str)
        and len(value) <= len(str(INT32_MAX))
        and value.isascii()
        and value.isdigit()
        and value == str(int(value))
        and int(value) <= INT32_MAX
    )


def _is_bias(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -MAX_BIAS <= value <= MAX_BIAS  # not a number is in no range


def false_is_none(value: object) -> object:
    """Some clients of completions say `false`, as chats do."""
    return None if value is False else value


def _to_logprobs(value: object, info: ValidationInfo) -> object:
    """Of chats or completions. What is beyond the API's own bound, its range tells."""
    limit = limits_of(info).max_logprobs
    if is_int(value) and isinstance(value, int) and limit < value <= MAX_LOGPROBS:
        raise InvalidField(info.field_name, f"'{info.field_name}' must be at most {limit}.")
    return value


_BIAS_SCHEMA = {
    "type": "object",
    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
}
Logprobs = Annotated[int, BeforeValidator(_to_logprobs), Field(ge=0, le=MAX_LOGPROBS)]


class SamplingFields(BaseModel):
    """Neutral by default: each then leaves the model's distribution as it is."""

    model_config = ConfigDict(strict=True, frozen=True)

    min_p: MinP = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: Annotated[
        tuple[tuple[int, float], ...], BeforeValidator(_to_biases), WithJsonSchema(_BIAS_SCHEMA)
    ] = ()

    @property
    def num_logprobs(self) -> int | None:
        """Most probable tokens to tell beside each token drawn; None = tell nothing of either."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same of the prompt's tokens."""
        return None

    def asked_of_logits(self) -> str | None:
        """A field that can be honoured only where there are logits; None if there is none."""
        neutral = SamplingFields.model_construct()
        for name in SamplingFields.model_fields:
            if getattr(self, name) != getattr(neutral, name):
                return name
        return None if self.num_logprobs is None else "logprobs"
