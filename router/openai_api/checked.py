"""From a body's fields to one of the smaller endpoints' types, or an error that names the field.

And the limits that every endpoint's fields are checked against.

Knows pydantic's errors; knows no endpoint. Chat and completions, with their hundred fields, have rules of
their own (`schema.py`, `fields.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError, ValidationInfo

from router.errors import InvalidField
from router.limits import Limits

_Checked = TypeVar("_Checked", bound=BaseModel)


def limits_of(info: ValidationInfo) -> Limits:
    """What the body is parsed under; the defaults for a value that was built otherwise."""
    return info.context if isinstance(info.context, Limits) else Limits()


def to_salt(value: object, info: ValidationInfo) -> object:
    """`cache_salt` or `prompt_cache_key`, as long as it may be. Raises InvalidField."""
    limit = limits_of(info).max_salt_chars
    if isinstance(value, str) and len(value) > limit:
        raise InvalidField(info.field_name, f"'{info.field_name}' must have at most {limit} characters.")
    return value


def checked(
    kind: type[_Checked], body: Mapping[str, Any], limits: Limits, texts: Mapping[str, str]
) -> _Checked:
    """Null counts as absent. texts: by field, what it must be, in words. Raises InvalidField."""
    given = {name: value for name, value in body.items() if value is not None}
    try:
        return kind.model_validate(given, context=limits)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = str(first["loc"][0])
        if first["type"] == "missing":
            raise InvalidField(name, f"'{name}' is required.", code="missing_required_parameter") from None
        raise InvalidField(name, f"'{name}' must be {texts[name]}.") from None
