"""What the engine needs to be imported: torch, numpy, xxhash and msgspec.

Where there is a GPU and nothing of the service, `tests/gpu` and the GPU benchmark run all the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SERVICE = ("ray", "zmq", "llguidance", "rich", "fastapi", "pydantic", "prometheus_client", "httpx")
KERNELS = ("triton", "flash_attn")
# Whoever needs one of them, and which. All else in `cache`, `replica` and the GPU benchmark needs none.
NEEDING = {
    "replica.server": "ray",
    "replica.node": "zmq",
    "replica.publisher": "zmq",
    "replica.ask": "rich",
    "replica.__main__": "rich",
    "replica.attention.paged_kernels": "triton",
    "replica.layers.row_kernels": "triton",
}
PROGRAM = """
import importlib, importlib.abc, json, pkgutil, sys

blocked, packages = json.loads(sys.argv[1])

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is not here", name=name.partition(".")[0])

sys.meta_path.insert(0, Blocker())
outcome = {}
for package in packages:
    path = importlib.import_module(package).__path__
    for module in pkgutil.walk_packages(path, package + ".", onerror=lambda name: None):
        try:
            importlib.import_module(module.name)
            outcome[module.name] = None
        except ModuleNotFoundError as error:
            outcome[module.name] = error.name
print(json.dumps(outcome))
"""


def test_the_engine_imports_without_the_service() -> None:
    """And whoever may need more still does: a name that has become needless leaves the list."""
    arguments = json.dumps([[*SERVICE, *KERNELS], ["cache", "replica", "benchmarks.gpu"]])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert len(outcome) > 80, "it found hardly anything to import"
    assert {name: missing for name, missing in outcome.items() if missing is not None} == NEEDING
