"""The Routers' variable in a file's `args.router`: the same Router as with it laid over."""

from __future__ import annotations

from typing import Any

import pytest

from cache.errors import ConfigError
from deploy.config import AppConfig
from deploy.router_settings import over_app
from deploy.router_variable import ROUTER_VARIABLE, folded, settings_in


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"policy": "random"}, "policy: lmetric\nmax_wait_s: null"),
        ({"limits": {"max_tools": 3, "max_prompts": 5}}, "limits: {max_tools: 7}"),
        ({"policy": "chwbl", "policy_options": {"replication": 64}}, "policy_options: {}"),
        ({}, "record: {folder: /traces}\nlimits: {max_tools: 7}"),
        ({"record": {"folder": "/a", "block_tokens": 32}}, "record: {folder: /b}"),
        ({"record": {"folder": "/a"}}, "record: null"),
        ({"default_sampling": {"top_p": 0.5}}, "default_sampling: {temperature: 0.5}"),
    ],
)
def test_folded_they_make_the_router_that_they_make_laid_over(settings: dict[str, Any], text: str) -> None:
    before = AppConfig.from_args({"router": settings})
    now = AppConfig.from_args({"router": folded(settings, settings_in(text))})
    assert now.router_sketch() == over_app(before, text, ROUTER_VARIABLE).router_sketch()


def test_nothing_is_no_settings_and_what_is_no_mapping_is_not_shown() -> None:
    assert settings_in("# nothing") == {}
    with pytest.raises(ConfigError, match=r"WARMPATH_ROUTER = '\(hidden\)': must be a mapping"):
        settings_in("[debug_token]")
