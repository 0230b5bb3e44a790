"""Which tests need a cluster: a dozen processes, so that two at once would wait for each other."""

from __future__ import annotations

FOLDER = "tests/e2e"


def needs_cluster(nodeid: str) -> bool:
    return nodeid.startswith(f"{FOLDER}/")
