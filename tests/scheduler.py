"""Which of several test processes runs what: one all that need a cluster, one all that start some and may
wait for them, and whoever is free the rest, a file at a time.

Most of such tests' time is waiting, which the others fill. Needs pytest-xdist.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

from tests.clusters import FOLDER, is_patient, needs_cluster


class OneForClusters(LoadFileScheduling):
    """As `--dist loadfile`, with all that need clusters as one file, and all that start some as another."""

    def _split_scope(self, nodeid: str) -> str:
        if is_patient(nodeid):
            return f"{FOLDER}, patient"
        return FOLDER if needs_cluster(nodeid) else super()._split_scope(nodeid)
