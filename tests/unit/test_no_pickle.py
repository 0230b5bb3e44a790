"""Nothing of ours unpickles: what comes from a socket or a file is decoded with a schema, or refused."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cache", "replica", "router", "deploy")
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# pyzmq's, torch's and numpy's ways to unpickle; yaml's to build any object.
CALLS = {"recv_pyobj", "send_pyobj", "recv_serialized", "unsafe_load", "full_load"}
LOADERS = {("torch", "load"), ("np", "load"), ("numpy", "load")}


def unpicklers(source: str) -> Iterator[str]:
    """Names in `source` that can run what they read."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in CALLS or (owner, node.attr) in LOADERS:
                yield f"{owner}.{node.attr}"


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_unpickles(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    found = {str(path.relative_to(ROOT)): list(unpicklers(path.read_text())) for path in files}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, cloudpickle.cloudpickle",
        "def f():\n    from pickle import loads",
        "socket.recv_pyobj()",
        "self.socket.recv_pyobj()",
        "torch.load(path)",
        "np.load(path)",
        "yaml.unsafe_load(text)",
    ],
)
def test_what_would_be_found(source: str) -> None:
    assert list(unpicklers(source))
