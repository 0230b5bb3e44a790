"""A digest of the code that a cell's result depends on, so that kept results are never those of other code.

Only what can change a result counts: the simulation, what it imports of this project, and the cell's own
policy, not its rivals. Comments, docstrings and layout do not count, nor does what is compiled: it does what
the Python beside it does. Knows source files; runs none of them.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from functools import cache
from itertools import accumulate, chain
from pathlib import Path

from router.policies import POLICIES

PACKAGES = ("cache", "replica", "router", "loadtest")
SIMULATION = "loadtest.simulation.run"
# It imports every policy; which one a cell uses, and with what options, is in the cell itself.
REGISTRY = "router.policies"


@cache
def code_version(policy: str) -> str:
    """Digest of the simulation's code and of that policy's; of the simulation's alone for an ideal."""
    roots = {SIMULATION}
    if policy in POLICIES:
        roots.add(POLICIES[policy].policy_type.__module__)
    digest = hashlib.sha256()
    for module in sorted(_reachable(roots)):
        digest.update(f"{module}\n{_code(module)}\n".encode())
    return digest.hexdigest()


def _reachable(roots: set[str]) -> set[str]:
    """Those modules and every module of this project that they import, directly or not."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module in found or module == REGISTRY:
            continue
        found.add(module)
        waiting += _imports(module)
    return found


@cache
def _imports(module: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_imported(ast.parse(_path(module).read_bytes()))))


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            # `import package.name` runs the package, too.
            dotted = [accumulate(alias.name.split("."), "{}.{}".format) for alias in node.names]
            names = [*chain.from_iterable(dotted)]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # `from package import name` may name a module of it or something in it.
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.partition(".")[0] in PACKAGES and _is_module(name):
                yield name


@cache
def _code(module: str) -> str:
    """The module's syntax tree without docstrings."""
    tree = ast.parse(_path(module).read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
    return ast.dump(tree)


@cache
def _is_module(name: str) -> bool:
    """Whether it is one in Python."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its parent is a module, not a package: the name stands for something in it
        return False
    return spec is not None and spec.origin is not None and spec.origin.endswith(".py")


@cache
def _path(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    origin = spec.origin if spec is not None else None
    assert origin is not None, f"{module} has no source"
    return Path(origin)
