"""The Router's settings check themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cache.errors import ConfigError
from router.config import RecordConfig
from router.limits import Limits
from router.policies import NAMES
from router.tenants.settings import TenantSettings
from tests.fakes.router import config


@pytest.mark.parametrize("policy", NAMES)
def test_every_policy_can_be_configured(policy: str) -> None:
    assert config(policy=policy).policy == policy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "fastest"),
        ("predicted_ttl_s", 4000.0),
        ("reservation_ttl_s", 0.0),
        ("max_wait_s", 0.0),
        ("max_wait_s", float("nan")),
        ("overload_wait_s", 0.0),
        ("silent_after_s", 0.0),
        ("max_attempts", 0),
        ("shadow_policy", "fastest"),
        ("shadow_share", 1.5),
        ("debug_requests", 0),
    ],
)
def test_a_wrong_value_is_named_with_what_is_accepted(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**{field: value})
    assert caught.value.field == field
    assert str(value) in str(caught.value)
    assert "must be" in caught.value.accepted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_body_bytes", 1),
        ("max_prompts", 0),
        ("max_json_depth", 129),
        ("max_logprobs", 21),
        ("max_logprobs", -1),
        ("max_pending_structures", 0),
        ("max_timeout_seconds", 0),
        ("max_prefix_copies", 0),
    ],
)
def test_a_limit_out_of_range_is_named(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match="must be between") as caught:
        Limits(**{name: value})
    assert caught.value.field == f"limits.{name}"


@pytest.mark.parametrize(
    "origin",
    [
        *("chat.example", "https://chat.example/", "https://Chat.example", "null"),
        *("http://chat.example:80", "https://chat.example:443"),  # browsers leave these out
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    """Its pages would be told nothing, for ever."""
    config(allowed_origins=("*", "http://[::1]:3000", "http://chat.example:443", "https://chat.example:80"))
    with pytest.raises(ConfigError, match="as browsers send them") as caught:
        config(allowed_origins=("https://chat.example", origin))
    assert (caught.value.field, caught.value.value) == ("allowed_origins", origin)


def test_a_short_secret_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        config(debug_token="hunter2")
    assert caught.value.field == "debug_token"
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"record\.key"):
        RecordConfig(folder="/traces", key="hunter2")


def test_a_recordings_key_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("k" * 16 + "\n")
    record = RecordConfig(folder="/traces", key_file=str(file))
    assert record.read_key() == b"k" * 16
    file.write_text("k" * 15 + "\n")
    with pytest.raises(ConfigError, match=r"record\.key_file = '\(hidden\)': must hold at least 16"):
        record.read_key()
    file.unlink()
    with pytest.raises(ConfigError, match=r"record\.key_file = '.*key': cannot be read \(No such file"):
        record.read_key()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"key_file": "key"}, "must be an absolute path"),
        ({"key_file": "/key", "key": "k" * 16}, "cannot be set beside key"),
    ],
)
def test_a_recordings_key_file_that_makes_no_sense_is_refused(settings: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        RecordConfig(folder="/traces", **settings)  # type: ignore[arg-type]
    assert caught.value.field == "record.key_file"
    assert "kkkk" not in str(caught.value)


@pytest.mark.parametrize("token", ["s" * 20 + "\n", " " * 20, "ß" * 20, "s" * 20 + "\0"])
def test_a_token_that_no_header_brings_is_refused_and_not_shown(token: str) -> None:
    """A file's last line break is easily part of it; whoever sends the rest would get 401 for ever."""
    with pytest.raises(ConfigError, match=r"^debug_token = '\(hidden\)': must be of printable ASCII"):
        config(debug_token=token)
    config(debug_token="a pass phrase of some words")


def test_one_kind_of_key_opens_the_debug_page() -> None:
    keys = TenantSettings(keys_file="/k", cache_scope="shared")
    with pytest.raises(ConfigError, match="operators' keys open") as caught:
        config(debug_token="a" * 20, tenants=keys)
    assert "aaaa" not in str(caught.value)


def test_secrets_are_in_no_representation() -> None:
    made = config(debug_token="a" * 20, record=RecordConfig(folder="/traces", key="b" * 20))
    assert "aaaa" not in repr(made)
    assert "bbbb" not in repr(made)


def test_recorded_blocks_are_whole_blocks() -> None:
    config(record=RecordConfig(folder="/traces", block_tokens=64))
    with pytest.raises(ConfigError, match="multiple of 16"):
        config(record=RecordConfig(folder="/traces", block_tokens=40))


def test_a_shadow_policys_knobs_are_its_own() -> None:
    config(shadow_policy="expected_time", shadow_policy_options={"near_tie": 0.0})
    with pytest.raises(ConfigError) as caught:
        config(shadow_policy="expected_time", shadow_policy_options={"near_ties": 0.0})
    assert caught.value.field == "shadow_policy_options.near_ties"
    with pytest.raises(ConfigError, match="no shadow_policy"):
        config(shadow_policy_options={"near_tie": 0.0})
