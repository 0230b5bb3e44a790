"""`args` of deploy.yaml: typed values, or an error that names key, value and accepted range."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from cache.errors import ConfigError
from cache.fingerprint import Fingerprint, HashAlgorithm
from deploy.config import AppConfig, router_config
from deploy.errors import UnknownKey

FINGERPRINT = Fingerprint("m", "r", "float32", "", 16, HashAlgorithm.XXH3_128)


def test_values_reach_their_fields() -> None:
    config = AppConfig.from_args(
        {
            "replica": {
                "block_size": 32,
                "stream_interval_s": 1,
                "hash_algorithm": "sha256",
                "sim": {"base_s": 0.5},
            },
            "router": {"policy": "round_robin"},
        }
    )
    assert config.replica.block_size == 32
    assert config.replica.stream_interval_s == 1.0
    assert config.replica.hash_algorithm is HashAlgorithm.SHA256
    assert config.replica.sim.base_s == 0.5
    router = router_config(config, model_name="m", tokenizer="t", fingerprint=FINGERPRINT)
    assert (router.policy, router.model_name) == ("round_robin", "m")


def test_nothing_set_is_the_tiny_model() -> None:
    config = AppConfig.from_args({})
    assert config.model_name == "tiny"


@pytest.mark.parametrize(
    ("args", "where", "nearest"),
    [
        ({"replca": {}}, "args", "replica"),
        ({"replica": {"blok_size": 16}}, "args.replica", "block_size"),
        ({"router": {"polcy": "x"}}, "args.router", "policy"),
        ({"replica": {"sim": {"slow_down": 2.0}}}, "args.replica.sim", "slowdown"),
        ({"router": {"record": {"foldr": "x"}}}, "args.router.record", "folder"),
    ],
)
def test_unknown_key_names_the_nearest(args: dict[str, Any], where: str, nearest: str) -> None:
    with pytest.raises(UnknownKey) as caught:
        AppConfig.from_args(args)
    assert str(caught.value).startswith(f"{where}: unknown key")
    assert repr(nearest) in str(caught.value)


def test_what_follows_from_the_replicas_cannot_be_set_twice() -> None:
    with pytest.raises(UnknownKey):
        AppConfig.from_args({"router": {"model_name": "other"}})


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"replica": {"block_size": 0}}, "args.replica.block_size"),
        ({"replica": {"block_size": "16"}}, "args.replica.block_size"),
        ({"replica": {"block_size": True}}, "args.replica.block_size"),
        ({"replica": {"hash_algorithm": "md5"}}, "args.replica.hash_algorithm"),
        ({"replica": {"device": "tpu"}}, "args.replica.device"),
        ({"replica": 3}, "args.replica"),
        ({"router": {"policy_options": {"near_tie": "a"}}}, "args.router.policy_options.near_tie"),
        ({"router": {"record": {"folder": ""}}}, "args.router.record.folder"),
        ({"router": {"record": {"folder": "~/traces"}}}, "args.router.record.folder"),
        (
            {"router": {"record": {"folder": "/x", "max_total_bytes": 5}}},
            "args.router.record.max_total_bytes",
        ),
        ({"router": {"shadow_policy": "fastest"}}, "args.router.shadow_policy"),
        ({"replica": {"sim": {"slowdown": -1.0}}}, "args.replica.sim.slowdown"),
        ({"router": {"tenants": {"keys_file": "keys.yaml"}}}, "args.router.tenants.keys_file"),
        ({"router": {"tenants": {"cache_scope": "user"}}}, "args.router.tenants.cache_scope"),
        ({"router": {"tenants": {"keys_variable": "K"}}}, "args.router.tenants.secret_file"),
    ],
)
def test_bad_value_names_key_and_value(args: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AppConfig.from_args(args)
    assert caught.value.field == field
    assert str(caught.value).startswith(field + " = ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("greedy_screen: on", "greedy_screen = true: .*; put it in quotes: YAML takes on, off"),
        ("greedy_screen: off", "greedy_screen = false: .*; put it in quotes: YAML takes on, off"),
        ("model: 8080", "model = 8080: .*; put it in quotes$"),
        ("revision: 2026-01-01", r"revision = 2026-01-01: .*; put it in quotes$"),
        ("async_scheduling: 1", r"async_scheduling = 1: Expected `bool \| str`, got `int`$"),
        ("num_blocks: yes", r"num_blocks = true: Expected `int \| null`, got `bool`$"),
    ],
)
def test_what_yaml_takes_for_something_else_than_text_is_to_be_quoted(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        AppConfig.from_args({"replica": yaml.safe_load(text)})


@pytest.mark.parametrize("text", ["inf", "+inf", "Infinity"])
def test_infinity_is_told_as_yaml_writes_it(text: str) -> None:
    """To YAML these are text."""
    said = rf"itl_target_s = '{re.escape(text)}': Expected `float \| null`.*; YAML writes infinity as \.inf$"
    with pytest.raises(ConfigError, match=said):
        AppConfig.from_args({"replica": yaml.safe_load(f"itl_target_s: {text}")})
    AppConfig.from_args({"replica": yaml.safe_load("itl_target_s: .inf")})


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            {"router": {"record": {"folder": "/x", "max_file_bytes": "1", "key": "1234567890123456"}}},
            "args.router.record.max_file_bytes = '1': Expected `int`, got `str`",
        ),
        (
            {"router": {"limits": {"max_body_bytes": None}}},
            "args.router.limits.max_body_bytes = null: Expected `int`, got `null`",
        ),
        (
            {"router": {"tenants": {"secret_file": "/x", "keys_file": 3}}},
            "args.router.tenants.keys_file = 3: Expected `str | null`, got `int`; put it in quotes",
        ),
        (
            {"replica": {"sim": {"base_s": 0.1, "slowdown": "2"}}},
            "args.replica.sim.slowdown = '2': Expected `float`, got `str`",
        ),
        (
            {"router": {"record": {"key": "1234567890123456"}}},
            "args.router.record = ['key']: Object missing required field `folder`",
        ),
    ],
)
def test_what_is_wrong_in_a_section_is_named_alone(args: dict[str, Any], said: str) -> None:
    """The whole section was printed, and its key in msgspec's way."""
    with pytest.raises(ConfigError) as caught:
        AppConfig.from_args(args)
    assert str(caught.value) == said


def test_where_keys_tell_tenants_apart_nobody_can_forge_a_hash() -> None:
    tenants = {"keys_variable": "K", "secret_variable": "S"}
    config = AppConfig.from_args({"router": {"tenants": tenants}})
    assert config.tenants.keys_variable == "K"
    assert config.replica.hash_algorithm is HashAlgorithm.SHA256
    asked_for = {"hash_algorithm": "xxh3_128"}
    config = AppConfig.from_args({"replica": asked_for, "router": {"tenants": tenants}})
    assert config.replica.hash_algorithm is HashAlgorithm.XXH3_128
    assert AppConfig.from_args({}).replica.hash_algorithm is HashAlgorithm.XXH3_128


def test_an_exporter_that_is_not_installed_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"args\.router\.traces.*'carrier-pigeon'"):
        AppConfig.from_args({"router": {"traces": "carrier-pigeon"}})
    assert AppConfig.from_args({"router": {"traces": "console"}}).router["traces"] == "console"


def test_router_range_is_checked_at_once() -> None:
    with pytest.raises(ConfigError, match=r"args\.router\.max_attempts = 0: must be between 1 and 100"):
        AppConfig.from_args({"router": {"max_attempts": 0}})
    with pytest.raises(ConfigError, match=r"policy_options\.near_tie = 3\.0: must be between 0\.0 and 1\.0"):
        AppConfig.from_args({"router": {"policy_options": {"near_tie": 3.0}}})
    with pytest.raises(
        ConfigError, match=r"policy_options\.luck = 1: expected_time has these options: near_tie"
    ):
        AppConfig.from_args({"router": {"policy_options": {"luck": 1}}})
    with pytest.raises(ConfigError, match=r"args\.router\.policy = 'fastest'"):
        AppConfig.from_args({"router": {"policy": "fastest"}})


def test_engines_compute_short_prompts_first_unless_the_file_says_otherwise() -> None:
    for router in ({}, {"binding": "late"}, {"binding": "at_once"}):
        assert AppConfig.from_args({"router": router}).replica.scheduling_order == "shortest_preempting"
    asked_for = {"replica": {"scheduling_order": "first_come"}}
    assert AppConfig.from_args(asked_for).replica.scheduling_order == "first_come"


@pytest.mark.parametrize(
    ("router", "where"),
    [
        ({"debug_token": 1234567890123456}, r"args\.router\.debug_token"),
        ({"record": {"folder": "/tmp", "key": 1234567890123456}}, r"args\.router\.record\.key"),
    ],
)
def test_a_secret_is_in_no_error(router: dict[str, Any], where: str) -> None:
    """One of digits alone is a number to YAML, and any mistake beside one is no reason to print it."""
    with pytest.raises(ConfigError, match=rf"^{where} = .*\(hidden\).*: Expected `str") as caught:
        AppConfig.from_args({"router": router})
    assert "1234567890123456" not in str(caught.value)
