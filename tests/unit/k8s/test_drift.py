"""What commands write and nobody wrote again is found, with kubectl and without."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from k8s import check, places
from k8s.places import PLACES, ROOT

Findings = list[str]


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder's sources and what is kept of them, to be changed; no kubectl unless a test says so."""
    for folder in (*places.SOURCES, "rendered"):
        shutil.copytree(ROOT / "k8s" / folder, tmp_path / folder)
    monkeypatch.setattr(places, "HERE", tmp_path)
    monkeypatch.setattr(check, "can_build", lambda: False)
    return tmp_path


def drift(name: str) -> Findings:
    return [str(each) for each in check._drift(PLACES[name])]


def change(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_the_copy_is_fine(copy: Path) -> None:
    assert drift("cpu-demo") == []


def test_sources_that_nobody_built_again(copy: Path) -> None:
    change(copy / "base" / "rayservice.yaml", "failureThreshold: 24", "failureThreshold: 25")
    (told,) = drift("cpu-demo")
    assert "rendered/cpu-demo.yaml: was not built from these sources: run `python -m k8s write`" in told


def test_a_file_more_is_another_source(copy: Path) -> None:
    (copy / "base" / "more.yaml").write_text("")
    assert drift("upgrade")


def test_a_config_changed_by_hand(copy: Path) -> None:
    change(
        copy / "overlays" / "gpu" / "serve-config.yaml",
        "max_batched_tokens: 2048",
        "max_batched_tokens: 4096",
    )
    assert any("gpu: serve-config.yaml: is not what deploy.yaml says" in each for each in drift("gpu"))


def test_a_kept_copy_changed_by_hand(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest is that of the sources still: only building tells."""
    built = (copy / "rendered" / "gpu.yaml").read_text().partition("\n")[2]
    monkeypatch.setattr(check, "can_build", lambda: True)
    monkeypatch.setattr(check, "build", lambda place: built)
    assert drift("gpu") == []
    change(copy / "rendered" / "gpu.yaml", "mode: token", "mode: disabled")
    (told,) = drift("gpu")
    assert "is not what kustomize builds" in told


def test_settings_that_render_refuses(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = copy / "wrong.yaml"
    wrong.write_text("http_option: {}\n")
    place = places.Place("gpu", (*PLACES["gpu"].settings, str(wrong)))
    (told,) = [str(each) for each in check._drift(place)]
    assert "unknown key 'http_option'; did you mean 'http_options'?" in told


@pytest.mark.parametrize(
    ("told", "can"),
    [
        ('{"kustomizeVersion": "v5.5.0"}', True),
        ('{"kustomizeVersion": "v4.5.7"}', False),
        ('{"clientVersion": {"minor": "20"}}', False),  # before 1.24 it does not say
        ("not JSON", False),
    ],
)
def test_an_old_kubectl_builds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, can: bool
) -> None:
    """Debian's failed on what it does not know, and `make check` with it."""
    command = tmp_path / "kubectl"
    command.write_text(f"#!/bin/sh\necho '{told}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert places.can_build() == can
    command.unlink()
    assert not places.can_build()
