"""Which of several test processes runs what: one runs all that need a cluster, the others a file at a time.

Most of such tests' time is waiting, which the others fill. Needs pytest-xdist.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

from tests.clusters import FOLDER, needs_cluster


class OneForClusters(LoadFileScheduling):
    """As `--dist loadfile`, with all that need clusters as one file."""

    def _split_scope(self, nodeid: str) -> str:
        return FOLDER if needs_cluster(nodeid) else super()._split_scope(nodeid)
