"""deploy.yaml as a RayService carries it: one truth, laid over by settings; refused where it cannot serve."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import ConfigError, ServingError
from deploy.__main__ import main
from deploy.config import ROUTER_KEYS_FROM_DEPLOY, AppConfig
from deploy.errors import DeployFileError, UnknownKey
from deploy.render import merge, patch, rendered, serve_config
from deploy.serve_file import ServeFile
from replica.config import ReplicaConfig
from router.config import RouterConfig

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy.yaml"

scalars = st.integers() | st.text(max_size=3) | st.booleans()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=10,
)


def settings(folder: Path, content: object) -> Path:
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def application(**content: Any) -> dict[str, Any]:
    return {"applications": [{"name": "warmpath", **content}]}


def test_differs_from_deploy_yaml_only_by_what_a_cluster_needs() -> None:
    """The drift that this whole command is there to prevent."""
    expected = yaml.safe_load(DEPLOY.read_text())
    expected["http_options"]["host"] = "0.0.0.0"
    expected["applications"][0]["args"]["replica"]["event_host"] = "node"
    expected["applications"][0]["args"]["router"]["expose_routing"] = False
    file = rendered(DEPLOY)
    assert file.content == expected
    assert yaml.safe_load(serve_config(file)) == expected


def test_settings_change_their_keys_alone(tmp_path: Path) -> None:
    first = settings(
        tmp_path,
        application(
            args={"router": {"dashboard": None, "expose_routing": True}},
            deployments=[
                {
                    "name": "Replica",
                    "num_replicas": None,
                    "autoscaling_config": {"min_replicas": 3, "max_replicas": 4},
                },
            ],
        ),
    )
    app = rendered(DEPLOY, [first]).content["applications"][0]
    plain = rendered(DEPLOY).content["applications"][0]
    assert app["args"]["router"] == {"policy": "expected_time", "expose_routing": True}
    assert app["deployments"][0] == plain["deployments"][0]
    changed = {**plain["deployments"][1], "autoscaling_config": {"min_replicas": 3, "max_replicas": 4}}
    del changed["num_replicas"]
    assert app["deployments"][1] == changed
    assert rendered(DEPLOY, [first]).num_replicas == 3


def test_settings_go_over_a_file_that_leaves_all_deployments_as_they_are(tmp_path: Path) -> None:
    """Such a file serves by defaults; laid over it, base settings were refused for want of names."""
    content = yaml.safe_load(DEPLOY.read_text())
    del content["applications"][0]["deployments"]
    path = tmp_path / "deploy.yaml"
    path.write_text(yaml.safe_dump(content))
    change = [{"name": "Replica", "num_replicas": None, "autoscaling_config": {"max_replicas": 3}}]
    file = rendered(path, [settings(tmp_path, application(deployments=change))])
    assert file.content["applications"][0]["deployments"] == [
        {"name": "Replica", "autoscaling_config": {"max_replicas": 3}}
    ]
    base = ROOT / "k8s" / "base" / "settings.yaml"
    assert rendered(path, [base]).options("Replica")["ray_actor_options"]["resources"] == {"engine": 1}
    misspelt = settings(tmp_path, application(deployments=[{"name": "Replicas"}]))
    with pytest.raises(DeployFileError, match="must be one of Router, Replica"):
        rendered(path, [misspelt])


def test_is_the_same_text_every_time_and_a_patch_holds_it_unchanged(tmp_path: Path) -> None:
    file = rendered(DEPLOY)
    text = patch(file, service="warmpath", command="python -m deploy render")
    assert text == patch(rendered(DEPLOY), service="warmpath", command="python -m deploy render")
    document = yaml.safe_load(text)
    assert (document["kind"], document["metadata"]["name"]) == ("RayService", "warmpath")
    assert document["spec"]["serveConfigV2"] == serve_config(file)
    (tmp_path / "again.yaml").write_text(document["spec"]["serveConfigV2"])
    assert ServeFile.read(tmp_path / "again.yaml").content == file.content


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        ({"http_option": {}}, UnknownKey, "http_options"),
        (application(args={"replica": {"modle": "x"}}), UnknownKey, "model"),
        (application(args={"replica": {"block_size": 0}}), ConfigError, "block_size = 0: must be between 1"),
        (application(args={"replica": {"model": "/no/folder"}}), ConfigError, "does not exist"),
        (application(deployments=[{"name": "Replica", "num_replica": 2}]), UnknownKey, "num_replicas"),
        (application(deployments=[{"name": "Replicas"}]), DeployFileError, "must be one of Router, Replica"),
        ({"applications": [{"name": "other"}]}, DeployFileError, "must be one of warmpath"),
        ({"applications": {"warmpath": {}}}, DeployFileError, "must be one of warmpath"),
        ({"applications": True}, DeployFileError, "applications: must be a list, and each name must be"),
        ({"applications": None}, DeployFileError, "applications: must not be null"),
        ({"applications": [{"name": []}]}, DeployFileError, "must be one of warmpath"),
        (application(deployments=2), DeployFileError, "deployments: must be a list, and each name must be"),
        (
            application(deployments=[{"name": "Replica", "num_replicas": 4}, {"name": "Replica"}]),
            DeployFileError,
            "deployments: Replica must be there once",
        ),
        ({"http_options": {"host": "127.0.0.1"}}, ConfigError, r"http_options\.host = '127\.0\.0\.1'"),
        (application(args={"replica": {"event_host": "10.0.0.1"}}), ConfigError, "event_host"),
        (  # the Service would be empty: it leaves the head out
            {"proxy_location": "HeadOnly"},
            ConfigError,
            "proxy_location = 'HeadOnly': must be EveryNode: the Service leaves the head out",
        ),
        ({"proxy_location": "Disabled"}, ConfigError, "proxy_location = 'Disabled': must be EveryNode"),
        (
            application(
                args={"replica": {"device": "cuda"}},
                deployments=[{"name": "Replica", "ray_actor_options": {"num_gpus": 2}}],
            ),
            ConfigError,
            "num_gpus = 2: must be 1, as args.replica.tensor_parallel is",
        ),
        (
            application(
                args={"replica": {"device": "cuda"}},
                deployments=[{"name": "Replica", "ray_actor_options": {"num_gpus": 0.5}}],
            ),
            ConfigError,
            "num_gpus = 0.5: must be 1 where device is cuda: one whole GPU for each rank of an engine",
        ),
        (
            application(
                args={"replica": {"device": "cpu"}},
                deployments=[{"name": "Replica", "ray_actor_options": {"num_gpus": 1}}],
            ),
            ConfigError,
            "must be 0 where device is cpu",
        ),
    ],
)
def test_what_cannot_serve_is_refused(
    tmp_path: Path, content: object, error: type[ServingError], words: str
) -> None:
    with pytest.raises(error, match=words):
        rendered(DEPLOY, [settings(tmp_path, content)])


def test_where_proxies_are_may_be_left_to_serve(tmp_path: Path) -> None:
    assert "proxy_location" not in rendered(DEPLOY, [settings(tmp_path, {"proxy_location": None})]).content


def test_an_engine_of_several_ranks_takes_as_many_gpus(tmp_path: Path) -> None:
    """What `check` asks for: one of the two refused any number."""
    change = application(
        args={"replica": {"device": "cuda", "tensor_parallel": 2}},
        deployments=[{"name": "Replica", "ray_actor_options": {"num_gpus": 2}}],
    )
    assert rendered(DEPLOY, [settings(tmp_path, change)]).options("Replica")["ray_actor_options"] == {
        "num_gpus": 2
    }
    del change["applications"][0]["deployments"]
    rendered(DEPLOY, [settings(tmp_path, change)])


def test_refuses_whatever_check_refuses(tmp_path: Path) -> None:
    content = yaml.safe_load(DEPLOY.read_text())
    for change in (
        {"applications": [{**content["applications"][0], "import_path": "other:app"}]},
        {"applications": [{**content["applications"][0], "args": {"router": {"policy": "best"}}}]},
        {"applications": []},
        {"applications": 3},
    ):
        path = tmp_path / "deploy.yaml"
        path.write_text(yaml.safe_dump({**content, **change}))
        with pytest.raises(ServingError) as by_check:
            ServeFile.read(path)
        with pytest.raises(type(by_check.value)):
            rendered(path)


def test_a_model_on_the_nodes_is_not_looked_for_here(tmp_path: Path) -> None:
    path = settings(tmp_path, application(args={"replica": {"model": "/models/llama"}}))
    assert rendered(DEPLOY, [path], mounted=Path("/models")).app.model_name == "/models/llama"
    with pytest.raises(ConfigError, match="does not exist"):
        rendered(DEPLOY, [path], mounted=Path("/model"))


def test_command_writes_the_patch_and_exits_2_naming_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "patch.yaml"
    assert main(["render", str(DEPLOY), "--patch", "warmpath", "--output", str(output)]) == 0
    assert yaml.safe_load(output.read_text())["spec"]["serveConfigV2"] == serve_config(rendered(DEPLOY))
    assert main(["render", str(DEPLOY)]) == 0
    assert capsys.readouterr().out == serve_config(rendered(DEPLOY))
    wrong = settings(tmp_path, {"http_option": {}})
    assert main(["render", str(DEPLOY), "--settings", str(wrong)]) == 2
    assert "settings.yaml" in capsys.readouterr().err.replace("\n", "")


@given(base=values, change=values)
def test_merging_changes_neither_and_twice_is_once(base: Any, change: Any) -> None:
    before = copy.deepcopy((base, change))
    once = merge(base, change)
    assert (base, change) == before
    assert merge(once, change) == once
    assert merge(base, {}) == (base if isinstance(base, dict) else {})


def test_null_removes_at_any_depth() -> None:
    assert merge({"a": {"b": 1, "c": 2}}, {"a": {"b": None}, "d": {"e": None, "f": 1}}) == {
        "a": {"c": 2},
        "d": {"f": 1},
    }


def test_every_setting_passes(tmp_path: Path) -> None:
    """What a config learns later too: `render` has no list of settings, so no place has to be told of one."""
    sketch = AppConfig().router_sketch()
    replica = {each.name: getattr(ReplicaConfig(), each.name) for each in fields(ReplicaConfig)}
    router = {each.name: getattr(sketch, each.name) for each in fields(RouterConfig)}
    for key in ROUTER_KEYS_FROM_DEPLOY:
        router.pop(key, None)
    wanted = {}
    for side, settings_of_it in (("replica", replica), ("router", router)):
        plain = {k: v for k, v in settings_of_it.items() if isinstance(v, bool | int | float | str)}
        wanted[side] = json.loads(json.dumps(plain))  # as a file has them: no enums
    wanted["replica"]["event_host"] = "node"  # as every cluster has it
    file = rendered(DEPLOY, [settings(tmp_path, application(args=wanted))])
    args = yaml.safe_load(serve_config(file))["applications"][0]["args"]
    assert len(wanted["replica"]) > 15
    assert len(wanted["router"]) > 10
    for side, each in wanted.items():
        assert args[side] | each == args[side]
