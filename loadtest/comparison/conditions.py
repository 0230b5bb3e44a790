"""Under which conditions something was measured: one line each, for whoever reads the numbers later."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.machine import CPUINFO, commit, cpu_name
from cache.counted import counted

PACKAGES = ("ray", "torch", "transformers", "httpx", "locust")
_ROOT = Path(__file__).parents[2]


def conditions(command: list[str]) -> dict[str, str]:
    """command: the words after `python -m loadtest`."""
    cpuinfo = CPUINFO.read_text() if CPUINFO.exists() else ""
    versions = [f"{name} {version}" for name in PACKAGES if (version := _version(name))]
    return {
        "command": shlex.join(["python", "-m", "loadtest", *command]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{cpu_name(cpuinfo)}, {counted(os.cpu_count() or 1, 'core')}, {platform.system()}",
        "load average at the start": f"{os.getloadavg()[0]:.1f}",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "commit": commit(_ROOT / "loadtest"),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
