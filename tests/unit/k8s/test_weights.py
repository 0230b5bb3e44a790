"""How a model gets to the head that waits for it: both containers' commands, run here in a folder of ours."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.manifests import Manifests
from k8s.places import PLACES, ROOT

FETCH = yaml.safe_load((ROOT / "k8s/examples/fetch-model.yaml").read_text())
FAKE_HF = """#!/bin/sh
for each in "$@"; do case "$each" in --local-dir=*) folder="${each#--local-dir=}";; esac; done
echo "$*" > "$(dirname "$0")/asked"
mkdir -p "$folder" && echo {} > "$folder/config.json"
[ ! -e "$(dirname "$0")/fails" ] && echo weights > "$folder/model.safetensors"
"""


def shell(container: dict[str, Any], models: Path) -> list[str]:
    """The container's command, with `models` in the place of its volume."""
    return [*container["command"], *(each.replace("/models", str(models)) for each in container["args"])]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hf").write_text(FAKE_HF)
    (tmp_path / "bin" / "hf").chmod(0o755)
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def fetch(models: Path) -> int:
    (container,) = FETCH["spec"]["template"]["spec"]["containers"]
    environment = {"PATH": f"{models.parent / 'bin'}:/usr/bin:/bin"}
    return subprocess.run(shell(container, models), env=environment, capture_output=True).returncode


def test_the_model_is_there_whole_or_not_at_all(models: Path) -> None:
    (models.parent / "bin" / "fails").touch()
    assert fetch(models) != 0
    assert (models / "incoming" / "config.json").exists()  # half of it, which nobody waits for
    assert not (models / "model").exists()
    (models.parent / "bin" / "fails").unlink()
    assert fetch(models) == 0
    assert (models / "model" / "model.safetensors").exists()
    assert not (models / "incoming").exists()


def test_a_model_that_is_there_is_left_alone(models: Path) -> None:
    assert fetch(models) == 0
    (models.parent / "bin" / "asked").unlink()
    assert fetch(models) == 0
    assert not (models.parent / "bin" / "asked").exists()
    assert [path.name for path in models.iterdir()] == ["model"]


def test_neither_code_nor_pickles_are_fetched(models: Path) -> None:
    fetch(models)
    asked = (models.parent / "bin" / "asked").read_text().split()
    wanted = {each.removeprefix("--include=") for each in asked if each.startswith("--include=")}
    assert wanted == {"*.json", "*.txt", "*.jinja", "*.safetensors"}


def waiting_containers() -> Iterator[tuple[str, dict[str, Any]]]:
    for place in PLACES.values():
        for pod in Manifests.parse(place.kept.read_text()).pods():
            for container in pod.spec.get("initContainers", ()):
                yield place.name, dict(container)


def test_every_place_with_a_volume_waits_and_on_the_head_alone() -> None:
    """Workers wait for the head: the operator gives them a container for that."""
    assert [name for name, _ in waiting_containers()] == ["gpu", "ha", "ha-embedded", "upgrade"]


def test_the_head_waits_until_the_fetched_model_has_its_name(models: Path) -> None:
    _, container = next(waiting_containers())
    (variable,) = container["env"]
    environment = {"PATH": "/usr/bin:/bin", "MODEL": variable["value"].replace("/models", str(models))}
    command = [each.replace("sleep 5", "sleep 0.01") for each in shell(container, models)]
    waiting = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert waiting.stdout is not None
        assert "no model in" in waiting.stdout.readline()
        (models / "incoming").mkdir()
        (models / "incoming" / "config.json").touch()
        assert waiting.poll() is None
        assert fetch(models) == 0
        deadline = time.monotonic() + 30
        while waiting.poll() is None and time.monotonic() < deadline:
            waiting.stdout.readline()
        assert waiting.poll() == 0
    finally:
        waiting.kill()
        waiting.communicate()
