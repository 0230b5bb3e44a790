"""The overlays: which settings each is made of, how it is built, and the copy of the result that is kept.

`kubectl kustomize` builds where there is one. The kept copies are what is checked anywhere else: each
carries a digest of the sources, so that a change nobody built again is seen without kubectl too.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.render import patch, rendered
from deploy.serve_file import ServeFile

HERE = Path(__file__).parent
ROOT = HERE.parent
DEPLOY = Path("deploy.yaml")
MODELS = Path("/models")  # where components/weights mounts them
SERVICE = "warmpath"
SOURCES = ("base", "components", "overlays", "monitoring")
COMMAND = "python -m k8s write"
OLDEST_KUSTOMIZE = 5


@dataclass(frozen=True, slots=True)
class Place:
    """One overlay. Paths are relative to the project's root, as the command that renders is given them."""

    name: str
    settings: tuple[str, ...]  # laid over deploy.yaml in this order; empty: another overlay's config is used
    beside: str | None = None  # the overlay that this one refers to and does not contain

    @property
    def folder(self) -> Path:
        return HERE / (self.name if self.beside else f"overlays/{self.name}")

    @property
    def kept(self) -> Path:
        return HERE / "rendered" / f"{self.name}.yaml"

    def config(self, root: Path = ROOT) -> ServeFile:
        """Raises ServingError."""
        return rendered(root / DEPLOY, [root / each for each in self.settings], mounted=MODELS)

    def patch(self) -> str:
        """What `serve-config.yaml` in the overlay must say. Raises ServingError."""
        parts = [f"--settings {each}" for each in self.settings]
        command = f"python -m deploy render {DEPLOY} {' '.join(parts)} --mounted {MODELS} --patch {SERVICE}"
        return patch(self.config(), service=SERVICE, command=command)


_BASE = "k8s/base/settings.yaml"
_GPU = "k8s/overlays/gpu/settings.yaml"
_HA = "k8s/components/highly-available/settings.yaml"
PLACES: Mapping[str, Place] = {
    place.name: place
    for place in (
        Place("cpu-demo", (_BASE, "k8s/overlays/cpu-demo/settings.yaml")),
        Place("gpu", (_BASE, _GPU)),
        Place("ha", (_BASE, _GPU, _HA)),
        Place("ha-embedded", (_BASE, _GPU, _HA)),
        Place("upgrade", ()),
        Place("monitoring", (), beside="gpu"),
    )
}


def can_build() -> bool:
    """Whether a kubectl is installed whose kustomize knows components as these overlays use them: 5 or later.

    An older one (Debian 12's is of 2020) is as good as none: the kept copies are checked instead.
    """
    if shutil.which("kubectl") is None:
        return False
    command = ["kubectl", "version", "--client", "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        told = json.loads(done.stdout).get("kustomizeVersion", "v0")
        return int(told.lstrip("v").partition(".")[0]) >= OLDEST_KUSTOMIZE
    except ValueError:
        return False


def build(place: Place) -> str:
    """What `kubectl apply -k` would send. Raises CalledProcessError with kustomize's words in `stderr`."""
    command = ["kubectl", "kustomize", str(place.folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True, errors="replace").stdout


def kept_text(place: Place) -> str:
    """`build`, with a first line that says what it was built from."""
    return f"{digest_line()}\n{build(place)}"


def digest_line() -> str:
    return f"# Built by `{COMMAND}` from sources with the digest {sources_digest()}."


def sources_digest() -> str:
    """Of every file that kustomize could read."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((HERE / folder).rglob("*")):
            if path.is_file():
                digest.update(f"{path.relative_to(HERE)}\0{path.stat().st_size}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()
