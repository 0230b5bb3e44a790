"""The fields that shape a draw: their ranges, and what holds where a request names none of them.

Knows the API's fields; knows neither requests nor models' files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cache.errors import ConfigError

MODEL, OPENAI = "model", "openai"  # whose defaults hold
MAX_TOKENS = "max_tokens"
_INT32_MAX = (1 << 31) - 1

Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=-1, le=_INT32_MAX)]
MinP = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)]

ACCEPTED: Mapping[str, str] = {  # ends of sentences, for errors and documents
    "temperature": "a number between 0 and 2",
    "top_p": "a number above 0 and up to 1",
    "top_k": "an integer of at least 1, or 0 or -1 for all tokens",
    "min_p": "a number between 0 and 1",
    "presence_penalty": "a number between -2 and 2",
    "frequency_penalty": "a number between -2 and 2",
    "repetition_penalty": "a number between 0.01 and 100",
}
_SETTABLE: Mapping[str, str] = {**ACCEPTED, MAX_TOKENS: "an integer of at least 1"}
_AS_IT_IS: Mapping[str, str] = {}
_IN_FILE: Mapping[str, str] = {MAX_TOKENS: "max_new_tokens"}  # where generation_config.json has another name
OF_PROBABILITIES = frozenset({"temperature", "top_p", "top_k"})
"""Those that engines without logits take, too."""


class Sampling(BaseModel):
    """All of them, with OpenAI's defaults; what that API does not have changes nothing."""

    model_config = ConfigDict(strict=True, frozen=True)

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    max_tokens: Annotated[int, Field(ge=1, le=_INT32_MAX)] | None = None  # of chats; None = what is left


def check_default_sampling(setting: str | Mapping[str, float], of_model: Mapping[str, object]) -> None:
    """setting: of `RouterConfig`. of_model: what the model says. Raises ConfigError."""
    if not isinstance(setting, str):
        _check("default_sampling.", setting)
    elif setting not in (MODEL, OPENAI):
        raise ConfigError("default_sampling", setting, f"must be {MODEL}, {OPENAI}, or a mapping")
    elif setting == MODEL:
        try:
            _check("", of_model, _IN_FILE)
        except ConfigError as error:
            way_out = f"mend it, or set {OPENAI}, or a mapping of fields to values"
            raise ConfigError(
                "default_sampling", setting, f"the model's generation_config.json has {error}; {way_out}"
            ) from None


def _check(where: str, values: Mapping[str, object], called: Mapping[str, str] = _AS_IT_IS) -> None:
    """where: what stands before a name in errors. called: names that are others there."""
    for name, value in values.items():
        told = f"{where}{called.get(name, name)}"
        if name not in _SETTABLE:
            raise ConfigError(told, value, "must be one of " + ", ".join(_SETTABLE))
        try:
            Sampling.model_validate({name: value})
        except ValidationError:
            raise ConfigError(told, value, f"must be {_SETTABLE[name]}") from None
