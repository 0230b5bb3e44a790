"""`python -m deploy check`: what it says of each mistake, word for word; `render` refuses the same."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import app
from deploy.__main__ import main
from deploy.serve_file import DEPLOYMENTS
from replica.models import tiny_model

ROOT = Path(__file__).resolve().parents[3]
OWN: dict[str, Any] = yaml.safe_load((ROOT / "deploy.yaml").read_text())

Break = Callable[[dict[str, Any]], object]


def application(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = content["applications"][0]
    return found


def args(content: dict[str, Any], side: str) -> dict[str, Any]:
    found: dict[str, Any] = application(content)["args"][side]
    return found


def routers_own(settings: Any) -> dict[str, Any]:
    """Ray's options of a Router with settings of its own."""
    variables = {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0", "WARMPATH_ROUTER": settings}
    return {"num_cpus": 0.2, "runtime_env": {"env_vars": variables}}


def deployment(content: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = [each for each in application(content)["deployments"] if each["name"] == name]
    return found


EXPORTERS = ", ".join(
    sorted({each.name for each in entry_points(group="opentelemetry_traces_exporter")})
    or ["none is installed"]
)
REPLICA = "applications.warmpath.deployments.Replica"
ROUTERS_OWN = (
    "applications.warmpath.deployments.Router.ray_actor_options.runtime_env.env_vars.WARMPATH_ROUTER"
)
MISTAKES: dict[str, tuple[Break, str]] = {
    "unknown setting": (
        lambda c: args(c, "router").update(polcy="round_robin"),
        "UnknownKey in FILE: args.router: unknown key 'polcy'; did you mean 'policy'?",
    ),
    "unknown option of Serve's": (
        lambda c: deployment(c, "Replica").update(max_ongoing_request=1000),
        f"UnknownKey in FILE: {REPLICA}: unknown key 'max_ongoing_request'; "
        "did you mean 'max_ongoing_requests'?",
    ),
    "unknown option of Ray's": (
        lambda c: deployment(c, "Replica").update(ray_actor_options={"num_gpu": 1}),
        f"UnknownKey in FILE: {REPLICA}.ray_actor_options: unknown key 'num_gpu'; did you mean 'num_gpus'?",
    ),
    "unknown deployment": (
        lambda c: deployment(c, "Replica").update(name="Replcia"),
        "UnknownKey in FILE: applications.warmpath.deployments: unknown key 'Replcia'; "
        "did you mean 'Replica'?",
    ),
    "deployment twice": (
        lambda c: application(c)["deployments"].append({"name": "Router"}),
        "ConfigError in FILE: applications.warmpath.deployments.Router = 2: must be there once",
    ),
    "deployment that is no mapping": (
        lambda c: application(c).update(deployments=["Replica"]),
        "ConfigError in FILE: applications.warmpath.deployments.0 = 'Replica': must be a mapping of settings",
    ),
    "user_config": (
        lambda c: deployment(c, "Router").update(user_config={"policy": "round_robin"}),
        "ConfigError in FILE: applications.warmpath.deployments.Router.user_config = "
        "{'policy': 'round_robin'}: is read by nobody: settings are in args, and Routers have "
        "WARMPATH_ROUTER",
    ),
    "setting of the Routers alone": (
        lambda c: deployment(c, "Router").update(ray_actor_options=routers_own("hold_window: 0")),
        f"ConfigError in FILE: {ROUTERS_OWN}.hold_window = 0: must be between 1 and 10000",
    ),
    "settings of the Routers alone, not as text": (
        lambda c: deployment(c, "Router").update(ray_actor_options=routers_own({"policy": "random"})),
        f"ConfigError in FILE: {ROUTERS_OWN} = '(hidden)': "
        "must be text: `WARMPATH_ROUTER: |`, and the lines below it, not dict",
    ),
    "number out of range": (
        lambda c: args(c, "replica").update(max_running=0),
        "ConfigError in FILE: args.replica.max_running = 0: must be between 1 and 4096",
    ),
    "number of Serve's out of range": (
        lambda c: deployment(c, "Replica").update(num_replicas=0),
        f"ConfigError in FILE: {REPLICA}.num_replicas = 0: Input should be greater than 0",
    ),
    "port": (
        lambda c: c["http_options"].update(port=70000),
        "ConfigError in FILE: http_options.port = 70000: must be between 1 and 65535",
    ),
    "type": (
        lambda c: args(c, "replica").update(block_size="16"),
        "ConfigError in FILE: args.replica.block_size = '16': Expected `int`, got `str`",
    ),
    "block size that a backend cannot serve": (
        lambda c: args(c, "replica").update(attention_backend="triton", block_size=2048),
        "ConfigError in FILE: args.replica.block_size = 2048: "
        "must be between 1 and 1024 for triton attention",
    ),
    "backend that is not there": (
        lambda c: args(c, "replica").update(attention_backend="paged"),
        "ConfigError in FILE: args.replica.attention_backend = 'paged': "
        "must be one of auto, gather_sdpa, triton, flash_attn",
    ),
    "Router and replicas: heartbeats": (
        lambda c: args(c, "router").update(silent_after_s=0.1),
        "ConfigError in FILE: args.router.silent_after_s = 0.1: must be more than "
        "args.replica.heartbeat_interval_s (0.5): idle replicas would pass for silent ones, and their "
        "caches for unknown",
    ),
    "Router and replicas: places": (
        lambda c: deployment(c, "Replica").update(max_ongoing_requests=5),
        "ConfigError in FILE: applications.warmpath.deployments.Replica.max_ongoing_requests = 5: must be at "
        "least 320: args.replica.max_running (64) and max_waiting (256), or Serve turns away what Routers "
        "send",
    ),
    "model that is not there": (
        lambda c: args(c, "replica").update(model="/nowhere"),
        "ModelRefused in FILE: model = '/nowhere': this folder does not exist",
    ),
    "model that is not there, of which a simulation has the tokenizer": (
        lambda c: args(c, "replica").update(runner="simulated", model="/nowhere"),
        "ModelRefused in FILE: model = '/nowhere': this folder does not exist",
    ),
    "more tokens than the model has positions for": (
        lambda c: args(c, "replica").update(max_model_len=1 << 20),
        "ConfigError in FILE: args.replica.max_model_len = 1048576: "
        "must be at most 32768, the positions that tiny knows",
    ),
    "brackets in a value": (
        lambda c: args(c, "replica").update(model="/nowhere/[/models]"),
        "ModelRefused in FILE: model = '/nowhere/[/models]': this folder does not exist",
    ),
    "brackets in what is accepted": (
        lambda c: args(c, "router").update(traces="nobodys"),
        "ConfigError in FILE: args.router.traces = 'nobodys': must be an installed OpenTelemetry exporter "
        f"({EXPORTERS}); in a clone: pip install -e '.[otel]'",
    ),
    "Routers' one loop": (
        lambda c: deployment(c, "Router").update(ray_actor_options={"num_cpus": 1}),
        "ConfigError in FILE: applications.warmpath.deployments.Router.ray_actor_options.runtime_env."
        'env_vars.RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP = null: must be "0" where ray_actor_options is set',
    ),
}


def broken(folder: Path, change: Break) -> Path:
    content = copy.deepcopy(OWN)
    change(content)
    path = folder / "deploy.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(("change", "said"), MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("command", ["check", "render"])
def test_mistake_is_named_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, change: Break, said: str
) -> None:
    path = broken(tmp_path, change)
    assert main([command, str(path)]) == 2
    heard = capsys.readouterr()
    assert heard.err == said.replace("FILE", str(path)) + "\n"
    assert heard.out == ""


@pytest.mark.parametrize("command", ["check", "render"])
def test_a_family_that_is_not_served_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """It was found out when the first replica had started. A simulation takes it: it computes nothing."""
    model = shutil.copytree(tiny_model.ensure_built(), tmp_path / "model")
    (model / "config.json").write_text('{"model_type": "bloom"}')
    path = broken(tmp_path, lambda c: args(c, "replica").update(model=str(model)))
    assert main([command, str(path)]) == 2
    assert "cannot be served: its attention does not go through" in capsys.readouterr().err
    path = broken(tmp_path, lambda c: args(c, "replica").update(model=str(model), runner="simulated"))
    assert main([command, str(path)]) == 0


@pytest.mark.parametrize("command", ["check", "render"])
def test_positions_that_depend_on_length_are_held_to_max_model_len(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    model = shutil.copytree(tiny_model.ensure_built(), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    (model / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    for max_model_len, status in ((65, 2), (64, 0)):
        path = broken(
            tmp_path,
            lambda c, limit=max_model_len: args(c, "replica").update(model=str(model), max_model_len=limit),
        )
        assert main([command, str(path)]) == status
    assert "set max_model_len to 64 or less" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "render"])
def test_damaged_weights_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """`serve` alone looked at them. A simulation reads none."""
    model = shutil.copytree(tiny_model.ensure_built(), tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"half")
    path = broken(tmp_path, lambda c: args(c, "replica").update(model=str(model)))
    assert main([command, str(path)]) == 2
    assert "model.safetensors is damaged: " in capsys.readouterr().err
    path = broken(tmp_path, lambda c: args(c, "replica").update(model=str(model), runner="simulated"))
    assert main([command, str(path)]) == 0


@pytest.mark.parametrize("command", ["check", "render"])
@pytest.mark.parametrize("runner", ["model", "simulated"])
@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (
            "tokenizer.json",
            '{"version": ',
            "tokenizer.json cannot be read: Expecting value: line 1 column 13",
        ),
        (
            "chat_template.jinja",
            "{% for each in messages %}\n{{ each }",
            "line 2 of chat_template.jinja is no chat template: unexpected '}'",
        ),
    ],
)
def test_a_damaged_tokenizer_or_template_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    runner: str,
    file: str,
    content: str,
    said: str,
) -> None:
    """Replicas died of the one, in Ray's log; of the other each chat was refused as its client's mistake."""
    model = shutil.copytree(tiny_model.ensure_built(), tmp_path / "model")
    (model / file).write_text(content)
    path = broken(tmp_path, lambda c: args(c, "replica").update(model=str(model), runner=runner))
    assert main([command, str(path)]) == 2
    assert f"ModelRefused in {path}: model = '{model}': {said}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "render"])
def test_sampling_that_a_model_sets_and_that_cannot_be_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    model = shutil.copytree(tiny_model.ensure_built(), tmp_path / "model")
    (model / "generation_config.json").write_text('{"top_k": -2}')
    path = broken(tmp_path, lambda c: args(c, "replica").update(model=str(model)))
    assert main([command, str(path)]) == 2
    assert capsys.readouterr().err == (
        f"ConfigError in {path}: args.router.default_sampling = 'model': the model's generation_config.json "
        "has top_k = -2: must be an integer of at least 1, or 0 or -1 for all tokens; mend it, or set openai"
        ", or a mapping of fields to values\n"
    )
    own = {"model": str(model)}
    path = broken(
        tmp_path,
        lambda c: (args(c, "replica").update(own), args(c, "router").update(default_sampling="openai")),
    )
    assert main([command, str(path)]) == 0


@pytest.mark.parametrize("number", ["-1", "0.5", "many"])
def test_a_number_of_gpus_that_no_cluster_has(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", str(ROOT / "deploy.yaml"), f"--gpus={number}"])
    assert "argument --gpus: must be a whole number, 0 or more" in capsys.readouterr().err


def test_more_gpus_than_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = broken(
        tmp_path,
        lambda c: (args(c, "replica").update(device="cuda"), deployment(c, "Replica").update(num_replicas=4)),
    )
    assert main(["check", str(path), "--gpus", "2"]) == 2
    assert capsys.readouterr().err == (
        f"ConfigError in {path}: applications.warmpath.deployments.Replica.num_replicas = 4: "
        "must be at most 2: each takes 1 GPU, and there are 2\n"
    )
    assert main(["check", str(path), "--gpus", "4"]) == 0


def test_one_replica_is_told_in_the_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = broken(tmp_path, lambda c: deployment(c, "Replica").update(num_replicas=1))
    assert main(["check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: fine (1 replica of tiny)\n"


def test_as_it_is_typed(tmp_path: Path) -> None:
    """The same by the command itself, which exits with 2."""
    change, said = MISTAKES["unknown setting"]
    path = broken(tmp_path, change)
    command = [sys.executable, "-m", "deploy", "check", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said.replace("FILE", str(path)) + "\n")


def test_the_names_are_those_of_the_application() -> None:
    assert DEPLOYMENTS == (app.Router.name, app.Replica.name)
