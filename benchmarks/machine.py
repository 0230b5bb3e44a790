"""The line that says where a measurement was made. Reads Linux's files and package metadata."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from cache.counted import counted

CPUINFO = Path("/proc/cpuinfo")
PACKAGES = ("torch", "transformers")
VECTORS = (("avx512f", "AVX-512"), ("avx2", "AVX2"))  # by the processor's flags, widest first


def describe(threads: int) -> str:
    """CPU, cores, threads, versions, commit: one line."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return (
        f"{cpu_name(_read(CPUINFO))}, {counted(os.cpu_count() or 1, 'core')}, "
        f"{counted(threads, 'torch thread')}, Python {platform.python_version()}, {versions}, "
        f"git {commit(Path(__file__).parent)}"
    )


def cpu_name(cpuinfo: str) -> str:
    """The first CPU's model name in the text of /proc/cpuinfo, else the architecture; and its widest vectors,
    by which kernels differ more than by names."""
    found: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), " ".join(value.split()))
    flags = found.get("flags", "").split()
    vectors = next((f" with {name}" for flag, name in VECTORS if flag in flags), "")
    return found.get("model name", platform.machine()) + vectors


def commit(folder: Path) -> str:
    """The checkout's short commit, "+" when files differ from it; "unknown" outside a checkout."""
    try:
        name = _git(folder, "rev-parse", "--short", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", ":/replica", ":/cache")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
