"""docs/configuration.md: every setting has one row, and each row says what the code does.

Keys and defaults are compared with the dataclasses and with Serve's own schemas. What is allowed is tried: a
row's bounds and words are accepted, what lies just beyond them is refused, and the refusal names the key.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import HTTPOptionsSchema, LoggingConfig, ServeApplicationSchema, ServeDeploySchema

from cache.errors import ConfigError
from deploy import app
from deploy.__main__ import main
from deploy.config import ROUTER_KEYS_FROM_DEPLOY, AppConfig
from deploy.render import merge
from deploy.scaling_options import POLICY
from deploy.serve_file import DEPLOYMENTS, ServeFile, load_mapping
from deploy.wanted_replicas import Targets
from replica.config import ReplicaConfig
from router.config import RouterConfig
from router.ingress import ONE_LOOP_VARIABLE
from router.limits import Limits
from router.policies import POLICIES
from tests.setting_rows import NONE_OF_THEM, REQUIRED, WORDS, Probes, Row, value_of

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "configuration.md").read_text()
SHIPPED = load_mapping(ROOT / "deploy.yaml")
SHIPPED_FOR_CARDS = load_mapping(ROOT / "deploy" / "gpu.yaml")

_CELLS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
ROWS = [Row.of(*cells) for cells in _CELLS if len(cells) != 2]
OF_POLICIES = {
    name: re.findall(r"`(\w+)` (\S+) \(([^)]*)\)", options)  # each with its default, and what is allowed
    for names, options in (cells for cells in _CELLS if len(cells) == 2)
    for name in re.findall(r"\w+", names)
}

STRUCTURE = {"applications", "name", "import_path", "args", "deployments"}  # of the file: no settings
CARDS = "0 (`tensor_parallel` on CUDA)"
HASHES = "`xxh3_128` (`sha256` with API keys)"


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.ray, "cluster_resources", dict)


# -- what the code has ---------------------------------------------------------------------------------


def _settings(where: str, kind: Any) -> Iterator[tuple[str, Any]]:
    """Every key below `where` with its default; of a section its keys."""
    hints = get_type_hints(kind)
    for each in dataclasses.fields(kind):
        hint, key = hints[each.name], f"{where}.{each.name}"
        section = next((part for part in (hint, *get_args(hint)) if dataclasses.is_dataclass(part)), None)
        if key.removeprefix("router.") in ROUTER_KEYS_FROM_DEPLOY:
            continue
        if section is not None:
            yield from _settings(key, section)
        else:
            yield key, _default(each)


def _default(each: Any) -> Any:
    if each.default_factory is not dataclasses.MISSING:
        return each.default_factory()
    if isinstance(each.default, tuple):
        return list(each.default)  # YAML's
    return REQUIRED if each.default is dataclasses.MISSING else each.default


OURS = {
    **dict(_settings("replica", ReplicaConfig)),
    **dict(_settings("router", RouterConfig)),
    **dict(_settings("router.policy_options", POLICIES["expected_time"].options_type)),
}


def _is_ours(key: str) -> bool:
    """Whether it is one of `args`, and no option of Serve's."""
    return key.startswith(("replica.", "router."))


def _serves(key: str) -> Any:
    """The default of an option of Serve's. Raises LookupError or AttributeError for one that it has not."""
    first, _, rest = key.partition(".")
    if first in DEPLOYMENTS:
        return _of_deployment(first, rest)
    schemas = {"http_options": HTTPOptionsSchema(), "logging_config": LoggingConfig()}
    if first in schemas:
        return getattr(schemas[first], rest)
    schema = ServeApplicationSchema if key == "route_prefix" else ServeDeploySchema
    return schema.model_fields[key].default


def _of_deployment(name: str, key: str) -> Any:
    if key.startswith("ray_actor_options."):
        return _actor_options(name).get(key.removeprefix("ray_actor_options."), 0)
    scaling = "autoscaling_config."
    for prefix, defaults in (
        (f"{scaling}policy.policy_kwargs.", Targets()),
        (f"{scaling}policy.", AutoscalingPolicy.model_construct()),
        (scaling, AutoscalingConfig()),
    ):
        if key.startswith(prefix):
            return getattr(defaults, key.removeprefix(prefix))
    return getattr(getattr(app, name)._deployment_config, key)


def _actor_options(name: str, **replica: Any) -> Mapping[str, Any]:
    """As `deploy/app.py` asks Ray for them."""
    bound = app.build({"replica": {"device": "cpu", **replica}})._bound_deployment
    deployment = bound if name == "Router" else bound.init_args[1]._bound_deployment
    found: Mapping[str, Any] = deployment.ray_actor_options
    return found


# -- what files say ------------------------------------------------------------------------------------


def _set_in(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a file sets, by the keys that the page has."""
    (application,) = content["applications"]
    found = {**dict(_leaves("", content)), **dict(_leaves("", application["args"]))}
    found |= {key: value for key, value in application.items() if key not in STRUCTURE}
    for each in application["deployments"]:
        found |= dict(_leaves(f"{each['name']}.", each))
    return found


def _leaves(where: str, content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(f"{where}{key}.", value)
        elif key not in STRUCTURE:
            yield f"{where}{key}", value


# -- what is said of a value ---------------------------------------------------------------------------

_KEYS = {"tenants": {"keys_file": "/keys", "secret_file": "/secret"}}
_RECORD = {"folder": "/traces", "max_file_bytes": 1 << 16, "max_total_bytes": 1 << 44}
BESIDE: dict[str, dict[str, Any]] = {  # what has to be set too, or out of the way, by how a key begins
    "replica.attention_backend": {"replica": {"block_size": 256}},
    "replica.preemption": {"replica": {"host_cache_gib": 1.0}},
    "router.shadow_policy_options": {"router": {"shadow_policy": "expected_time"}},
    "router.tenants.keys_": {"router": {"tenants": {"secret_file": "/secret"}}},
    "router.tenants.cache_scope": {"router": _KEYS},
    "router.record.": {"replica": {"block_size": 1}, "router": {"record": _RECORD}},
}


def _refusal(key: str, value: Any, router: Mapping[str, Any] | None = None) -> ConfigError | None:
    """What is said of a setting's value; None where it is accepted. router: its settings beside."""
    try:
        if _is_ours(key):
            given = next((each for start, each in BESIDE.items() if key.startswith(start)), {})
            args = copy.deepcopy({**given, **({"router": router} if router else {})})
            _put(args, key, value)
            AppConfig.from_args(args)
        else:
            ServeFile.checked(ROOT / "deploy.yaml", _with_option(key, value))
    except ConfigError as error:
        return error
    return None


def _with_option(key: str, value: Any) -> dict[str, Any]:
    """The project's deploy.yaml with one option of Serve's, and with what that needs."""
    content = copy.deepcopy(SHIPPED)
    (application,) = content["applications"]
    first, _, rest = key.partition(".")
    if key == "route_prefix":
        application[key] = value
    elif first not in DEPLOYMENTS:
        _put(content, key, value)
    else:
        (options,) = [each for each in application["deployments"] if each["name"] == first]
        if rest.startswith("autoscaling_config."):
            del options["num_replicas"]
            scaling = {"min_replicas": 1, "max_replicas": 4, "policy": {"policy_function": POLICY}}
            options["autoscaling_config"] = scaling
            application["args"]["router"]["max_wait_s"] = None  # which bounds what may be aimed at
        elif rest.startswith("ray_actor_options."):
            needed = {"Router": {"runtime_env": {"env_vars": {ONE_LOOP_VARIABLE: "0"}}}}
            options["ray_actor_options"] = needed.get(first, {"num_gpus": 0})
        _put(options, rest, value)
    return content


def _put(content: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for each in path:
        content = content.setdefault(each, {})
    content[last] = value


def _try(key: str, probes: Probes, router: Mapping[str, Any] | None = None) -> None:
    """router: its settings beside."""
    refused = list(probes.refused)
    if _is_ours(key):  # Serve's own take None for what was left out, and 1 for true
        refused += [] if None in probes.accepted else [None]
        refused += [math.nan] if probes.has_fraction else []
        refused += [1] if probes.has_switch else []
    for value in probes.accepted:
        assert _refusal(key, value, router) is None, (key, value)
    for value in refused:
        refusal = _refusal(key, value, router)
        assert refusal is not None, (key, value)
        if router is None:
            assert key.rpartition(".")[2] in f"{refusal.field} {refusal.accepted}", value


# -- the tables ----------------------------------------------------------------------------------------


def test_every_setting_has_one_row() -> None:
    keys = [row.key for row in ROWS]
    assert sorted({key for key in keys if keys.count(key) > 1}) == []
    assert {key for key in keys if _is_ours(key)} == set(OURS)


def test_every_option_that_our_files_set_has_a_row() -> None:
    targets = {
        f"Replica.autoscaling_config.policy.policy_kwargs.{each.name}" for each in dataclasses.fields(Targets)
    }
    expected = {*_set_in(SHIPPED), *_set_in(SHIPPED_FOR_CARDS), *targets}
    assert sorted(expected - {row.key for row in ROWS}) == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_a_default_is_the_codes(row: Row) -> None:
    default = OURS[row.key] if _is_ours(row.key) else _serves(row.key)
    assert row.default == default
    assert isinstance(row.default, bool) == isinstance(default, bool)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_what_deploy_yaml_sets_is_told(row: Row) -> None:
    assert row.shipped == _set_in(SHIPPED).get(row.key, row.default)


@pytest.mark.filterwarnings("ignore:`look_back_period_s`:FutureWarning")  # of the least that is allowed
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_what_is_allowed_is_accepted_and_nothing_beyond_it(row: Row) -> None:
    probes = Probes.of(row.allowed, OURS)
    _try(row.key, probes)
    if _is_ours(row.key) and probes.words:
        refusal = _refusal(row.key, NONE_OF_THEM)
        assert refusal is not None
        named = re.findall(r"\w+", refusal.accepted.removeprefix("must be ").removeprefix("one of "))
        others = [word for told in row.allowed.split("; ") if told in WORDS for word in told.split()]
        assert set(named) - {"or", "true", "false", *others} == probes.words


def test_replicas_on_cards_ask_for_one_each_rank(caplog: pytest.LogCaptureFixture) -> None:
    assert CARDS in PAGE
    assert _actor_options("Replica", device="cuda", tensor_parallel=2)["num_gpus"] == 2
    assert "no GPU in this cluster yet" in caplog.text


def test_keys_decide_which_hash_is_the_default() -> None:
    assert HASHES in PAGE
    assert AppConfig.from_args({"router": _KEYS}).replica.hash_algorithm == "sha256"


def test_every_policy_is_there_with_its_options() -> None:
    documented = {
        name: [(option, value_of(default)) for option, default, _ in options]
        for name, options in OF_POLICIES.items()
    }
    known = {
        name: [(each.name, each.default) for each in dataclasses.fields(spec.options_type)]
        for name, spec in POLICIES.items()
    }
    del known["expected_time"]  # in rows of its own
    assert documented == known


@pytest.mark.parametrize("name", OF_POLICIES)
def test_a_policys_options_allow_what_is_told(name: str) -> None:
    siblings = {option: value_of(default) for option, default, _ in OF_POLICIES[name]}
    for option, _, allowed in OF_POLICIES[name]:
        values = allowed if " to " in allowed else f"`{allowed}`"
        _try(f"router.policy_options.{option}", Probes.of(values, siblings), {"policy": name})


# -- the introduction ----------------------------------------------------------------------------------

EXAMPLES = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_example_changes_three_settings() -> None:
    args = yaml.safe_load(EXAMPLES[0])["args"]
    AppConfig.from_args(args)
    changed = list(_leaves("", args))
    assert len(changed) == 3
    assert all(_set_in(SHIPPED).get(key) != value for key, value in changed)


def test_the_example_of_settings_of_the_routers_alone_is_what_they_have_then() -> None:
    deployments = yaml.safe_load(EXAMPLES[1])
    content = merge(SHIPPED, {"applications": [{"name": "warmpath", **deployments}]})
    sketch = ServeFile.checked(Path("deploy.yaml"), content).app.router_sketch()
    assert (sketch.policy, sketch.limits) == ("mooncake_min_ttft", Limits(max_tools=32))
    assert len(EXAMPLES) == 2


def test_check_says_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"^\$ python -m deploy check deploy.yaml   # (.*)\n(.*)\n", PAGE, re.MULTILINE)
    assert len(shown) == 3
    for what, said in shown:
        content = copy.deepcopy(SHIPPED)
        if what != "as it is":
            key, value = what.removeprefix("with ").split(": ")
            content["applications"][0]["args"]["replica"][key] = int(value)
        Path("deploy.yaml").write_text(yaml.safe_dump(content))
        status = main(["check", "deploy.yaml"])
        assert "".join(capsys.readouterr()).rstrip("\n") == said
        assert status == (0 if what == "as it is" else 2)
