"""What is settled where the application is built, and what a replica settles on the node it landed on."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cache.errors import ConfigError
from deploy import app
from replica.config import ReplicaConfig
from replica.models import tiny_model
from replica.models.model_source import ModelRefused, ResolvedModel, resolve
from router.config import RouterConfig


@pytest.mark.parametrize(
    ("replica", "router", "named"),
    [
        ({"heartbeat_interval_s": 0.5}, {"silent_after_s": 0.2}, "args.router.silent_after_s"),
        ({"max_wait_s": 5.0}, {"binding": "at_once"}, "args.router.max_wait_s"),
        ({"host_cache_gib": 1.0, "prefix_caching": False}, {}, "args.replica.host_cache_gib"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused_by_serve_deploy_as_well(
    replica: dict[str, Any], router: dict[str, Any], named: str
) -> None:
    """It checks no file, and builds from settings alone."""
    with pytest.raises(ConfigError) as refused:
        app.build({"replica": replica, "router": router})
    assert refused.value.field == named


@pytest.mark.parametrize(
    ("num_replicas", "num_nodes", "threads"),
    [(1, 1, 8), (2, 1, 4), (3, 2, 4), (0, 1, 8), (0, 3, 8)],  # 0: as Serve says where replicas scale
)
def test_cores_and_memory_are_divided_by_the_replicas_of_a_node(
    num_replicas: int, num_nodes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = {"Alive": True, "Resources": {"CPU": 8.0}}
    on_nodes(monkeypatch, num_replicas, [home] * num_nodes + [{"Alive": False, "Resources": {}}])
    config = app._on_node(ReplicaConfig(device="cpu", kv_memory_fraction=0.8))
    assert config.torch_threads == threads
    assert config.kv_memory_fraction == pytest.approx(0.8 * threads / 8)


def test_nodes_that_take_no_replica_divide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Kubernetes: a head without CPUs and a pod for Routers beside the one where both engines are."""
    nodes = [
        {"Alive": True, "Resources": {"memory": 3e9}},
        {"Alive": True, "Resources": {"CPU": 2.0, "router": 2.0}},
        {"Alive": True, "Resources": {"CPU": 2.0, "engine": 2.0}},
    ]
    on_nodes(monkeypatch, 2, nodes, asked={"CPU": 1.0, "engine": 1.0})
    config = app._on_node(ReplicaConfig(device="cpu", kv_memory_fraction=0.8))
    assert (config.torch_threads, config.kv_memory_fraction) == (4, pytest.approx(0.4))


def test_a_placement_groups_own_resources_tell_nothing_of_other_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0}}, {"Alive": True, "Resources": {"CPU": 8.0}}]
    on_nodes(monkeypatch, 2, nodes, asked={"CPU": 1.0, "CPU_group_0_0123abcd": 1.0})
    assert app._on_node(ReplicaConfig(device="cpu")).torch_threads == 8


def on_nodes(
    monkeypatch: pytest.MonkeyPatch,
    num_replicas: int,
    nodes: list[dict[str, Any]],
    asked: dict[str, float] | None = None,
) -> None:
    """A replica of so many, on a node with eight cores. asked: Ray's resources that it has."""
    monkeypatch.setattr(app.ray, "nodes", lambda: nodes)
    context = SimpleNamespace(get_assigned_resources=lambda: {"CPU": 0.4} if asked is None else asked)
    monkeypatch.setattr(app.ray, "get_runtime_context", lambda: context)
    replica = SimpleNamespace(world_size=num_replicas)
    monkeypatch.setattr(app.serve, "get_replica_context", lambda: replica)
    monkeypatch.setattr(app.os, "sched_getaffinity", lambda _pid: range(8))


def test_who_starts_later_loads_what_the_router_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what a branch or the folder has become by then; and where it has changed, replicas are replaced."""
    monkeypatch.setattr(app.ray, "cluster_resources", dict)
    folder = shutil.copytree(tiny_model.ensure_built(), tmp_path / "model")
    router, replica = built(folder)
    assert replica.revision == router.fingerprint.revision
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    with pytest.raises(ModelRefused, match="deploy anew"):
        resolve(replica.model, replica.revision)
    assert built(folder)[1] != replica


def test_damaged_weights_are_refused_before_a_replica_is_stopped_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rolling update found it out when the first new one did not start. A simulation reads none."""
    monkeypatch.setattr(app.ray, "cluster_resources", dict)
    folder = shutil.copytree(tiny_model.ensure_built(), tmp_path / "model")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate((folder / "model.safetensors").stat().st_size - 1)
    with pytest.raises(ModelRefused, match=r"model\.safetensors is damaged"):
        built(folder)
    assert built(folder, runner="simulated")[1].model == str(folder)


@pytest.mark.parametrize("runner", ["model", "simulated"])
@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json cannot be read"),
        ("chat_template.jinja", "{{ messages", r"line 1 of chat_template\.jinja is no chat template"),
    ],
)
def test_a_damaged_tokenizer_is_refused_before_a_replica_is_stopped_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str, file: str, content: str, said: str
) -> None:
    monkeypatch.setattr(app.ray, "cluster_resources", dict)
    folder = shutil.copytree(tiny_model.ensure_built(), tmp_path / "model")
    (folder / file).write_text(content)
    with pytest.raises(ModelRefused, match=said):
        built(folder, runner)


def test_a_family_that_is_not_served_is_refused_before_a_replica_is_stopped_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.ray, "cluster_resources", dict)
    folder = shutil.copytree(tiny_model.ensure_built(), tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "bloom"}')
    with pytest.raises(ModelRefused, match="its attention does not go through"):
        built(folder)


@pytest.mark.parametrize(("runner", "expected"), [("model", {"temperature": 0.6}), ("simulated", {})])
def test_routers_are_told_how_the_model_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str, expected: dict[str, float]
) -> None:
    monkeypatch.setattr(app.ray, "cluster_resources", dict)
    folder = shutil.copytree(tiny_model.ensure_built(), tmp_path / "model")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    assert built(folder, runner)[0].sampling_defaults == expected


def built(model: Path, runner: str = "model") -> tuple[RouterConfig, ReplicaConfig]:
    """What Router and replicas are told."""
    application = app.build({"replica": {"model": str(model), "device": "cpu", "runner": runner}})
    router, replicas, _ = application._bound_deployment.init_args
    return router, replicas._bound_deployment.init_args[0]


def test_cuda_is_built_before_a_node_with_a_gpu_has_joined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On Kubernetes the head builds first. Refused once, Serve never builds it again: nothing was served."""
    (tmp_path / "config.json").write_text('{"dtype": "float16"}')
    model = ResolvedModel("m", tmp_path, "m", "r", None, None)
    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        config = app._on_hardware(ReplicaConfig(device="cuda"), model, num_gpus=0.0)
    assert (config.device, config.dtype) == ("cuda", "float16")
    assert "no GPU in this cluster yet" in caplog.text


@pytest.mark.parametrize(("num_gpus", "device", "dtype"), [(0.0, "cpu", "float32"), (2.0, "cuda", "float16")])
def test_auto_is_what_the_cluster_has(tmp_path: Path, num_gpus: float, device: str, dtype: str) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float16"}')
    model = ResolvedModel("m", tmp_path, "m", "r", None, None)
    config = app._on_hardware(ReplicaConfig(device="auto"), model, num_gpus=num_gpus)
    assert (config.device, config.dtype) == (device, dtype)


@pytest.mark.parametrize(("mode", "hides"), [("WORKER_MODE", True), ("SCRIPT_MODE", False)])
def test_a_process_of_its_own_builds_without_torch(
    mode: str, hides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever builds in another, as a notebook, may want torch there: it would be hidden for good."""
    hidden: list[bool] = []
    context = SimpleNamespace(worker=SimpleNamespace(mode=getattr(app.ray, mode)))
    monkeypatch.setattr(app.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(app.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(app.ray, "cluster_resources", dict)
    monkeypatch.setattr(app, "hide_torch", lambda: hidden.append(True))
    built(tiny_model.ensure_built())
    assert hidden == [True] * hides


def test_asking_whose_process_this_is_starts_no_ray() -> None:
    app._runs_no_model()
    assert not app.ray.is_initialized()
