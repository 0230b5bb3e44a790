"""What stands in a Router's environment is laid over its settings, and refused by its place there."""

from __future__ import annotations

from typing import Any

import pytest

from cache.errors import ConfigError
from cache.fingerprint import Fingerprint, HashAlgorithm
from deploy import app
from deploy.config import AppConfig
from deploy.errors import UnknownKey
from deploy.router_settings import laid_over, over_app
from deploy.router_variable import ROUTER_VARIABLE
from replica.config import ReplicaConfig
from router.config import RouterConfig
from router.limits import Limits
from router.tenants.settings import TenantSettings

KEYS = TenantSettings(keys_file="/keys.yaml", secret_file="/secret")


def config(algorithm: HashAlgorithm = HashAlgorithm.XXH3_128, **settings: Any) -> RouterConfig:
    fingerprint = Fingerprint("m", "", "", "", 16, algorithm)
    return RouterConfig(model_name="m", tokenizer="t", fingerprint=fingerprint, **settings)


def test_what_it_says_is_changed_and_the_rest_is_not() -> None:
    base = config(policy="random", limits=Limits(max_tools=3, max_prompts=5), max_wait_s=4.0)
    changed = laid_over(base, "policy: lmetric\nlimits: {max_tools: 7}\nmax_wait_s: null\n", ReplicaConfig())
    assert changed == config(policy="lmetric", limits=Limits(max_tools=7, max_prompts=5), max_wait_s=None)


def test_a_section_that_was_not_there_comes_whole() -> None:
    text = "record: {folder: /traces}\ntenants: {cache_scope: tenant}"
    changed = laid_over(config(tenants=KEYS), text, ReplicaConfig())
    assert changed.record is not None
    assert changed.record.folder == "/traces"
    assert (changed.tenants.keys_file, changed.tenants.cache_scope) == ("/keys.yaml", "tenant")
    assert laid_over(changed, "record: null", ReplicaConfig()).record is None


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_nothing_changes_nothing(text: str) -> None:
    assert laid_over(config(), text, ReplicaConfig()) == config()


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("hold_window: 0", "hold_window", "must be between 1 and 10000"),
        ("hold_window: many", "hold_window", "Expected `int`"),
        ("policy: best", "policy", "must be one of"),
        ("limits: {max_tools: 0}", "limits.max_tools", "must be"),
        ("limits: {max_tools: a}", "limits.max_tools", "Expected `int`"),
        ("limits: 3", "limits", "Expected"),
        ("default_sampling: {top_p: 2}", "default_sampling.top_p", "must be a number above 0"),
        ("default_sampling: 3", "default_sampling", "Expected"),
        ("record: {folder: relative}", "record.folder", "must be"),
        ("tenants: {cache_scope: nobody}", "tenants.cache_scope", "must be one of"),
        ("traces: nowhere", "traces", "must be"),
        ("silent_after_s: 0.1", "silent_after_s", "must be more than args.replica.heartbeat_interval_s"),
        ("binding: at_once\nmax_wait_s: 60", "max_wait_s", "must be at most args.replica.max_wait_s"),
        ("tenants: {keys_file: /k, secret_file: /s}", "tenants.keys_file", "must be in args.router"),
    ],
)
def test_a_wrong_value_is_named_by_its_place(text: str, field: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        laid_over(config(), text, ReplicaConfig(heartbeat_interval_s=0.2, max_wait_s=30.0), "PLACE")
    assert refused.value.field == f"PLACE.{field}"
    assert said in refused.value.accepted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("polisy: random", "PLACE: unknown key 'polisy'; did you mean 'policy'?"),
        ("limits: {max_tool: 3}", "PLACE.limits: unknown key 'max_tool'; did you mean 'max_tools'?"),
        ("record: {foldr: /t}", "PLACE.record: unknown key 'foldr'; did you mean 'folder'?"),
    ],
)
def test_an_unknown_key_is_named(text: str, message: str) -> None:
    with pytest.raises(UnknownKey) as refused:
        laid_over(config(), text, ReplicaConfig(), "PLACE")
    assert str(refused.value) == message


def test_what_follows_from_the_replicas_is_no_setting() -> None:
    with pytest.raises(UnknownKey):
        laid_over(config(), "model_name: another", ReplicaConfig())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- policy", "must be a mapping of settings"),
        ("random", "must be a mapping of settings"),
        ("debug_token: a secret token\n policy: [", "line 2"),
        ("policy: random\ndebug_token: a secret token\npolicy: lmetric", "is there twice, line 3"),
    ],
)
def test_what_is_no_mapping_is_refused_without_showing_it(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        laid_over(config(), text, ReplicaConfig())
    assert refused.value.field == ROUTER_VARIABLE
    assert said in str(refused.value)
    assert "secret" not in str(refused.value)


def test_keys_may_come_where_blocks_are_named_as_keys_want_it() -> None:
    text = "tenants: {keys_file: /keys.yaml, secret_file: /secret}"
    assert laid_over(config(HashAlgorithm.SHA256), text, ReplicaConfig()).tenants == KEYS


def test_a_deployments_settings_are_those_that_its_routers_will_have() -> None:
    base = AppConfig.from_args({"router": {"dashboard": True, "limits": {"max_tools": 3}}})
    changed = over_app(base, "dashboard: false\nlimits: {max_prompts: 2}", "PLACE")
    assert changed.router_sketch().limits == Limits(max_tools=3, max_prompts=2)
    assert not changed.router["dashboard"]
    assert changed.replica == base.replica


def test_a_router_takes_them_over_where_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[RouterConfig] = []
    monkeypatch.setattr(app.Ingress, "__init__", lambda self, config, *_: taken.append(config))
    handle: Any = None
    app.NodeRouter(config(), handle, ReplicaConfig())
    monkeypatch.setenv(ROUTER_VARIABLE, "policy: lmetric")
    app.NodeRouter(config(), handle, ReplicaConfig())
    assert taken == [config(), config(policy="lmetric")]
