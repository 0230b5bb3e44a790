"""The Router's settings check themselves."""

from __future__ import annotations

from typing import Any

import pytest

from cache.errors import ConfigError
from router.policies import NAMES
from tests.fakes_router import config


@pytest.mark.parametrize("policy", NAMES)
def test_every_policy_can_be_configured(policy: str) -> None:
    assert config(policy=policy).policy == policy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "fastest"),
        ("predicted_ttl_s", 4000.0),
        ("reservation_ttl_s", 0.0),
        ("silent_after_s", 0.0),
        ("max_attempts", 0),
        ("max_body_bytes", 1),
    ],
)
def test_a_wrong_value_is_named_with_what_is_accepted(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**{field: value})
    assert caught.value.field == field
    assert str(value) in str(caught.value)
    assert "must be" in caught.value.accepted
