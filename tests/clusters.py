"""Which tests need a cluster: a dozen processes, so that two at once would wait for each other."""

from __future__ import annotations

FOLDER = "tests/e2e"
# Start some of their own, and nothing is to be done in time there: with the others, which take as long as all
# the rest of the long suite, they would be what it waits for at last. One at a time: Ray's have 15 s to
# be up, which beside two other clusters is too little.
PATIENT = tuple(
    f"{FOLDER}/test_{name}.py"
    for name in ("bench_overhead", "compare", "container_commands", "simulation_validate")
)


def is_patient(nodeid: str) -> bool:
    """Whether it starts clusters, and may wait for them."""
    return nodeid.startswith(PATIENT)


def needs_cluster(nodeid: str) -> bool:
    """Whether it is to have the only one, but for the patient ones'."""
    return nodeid.startswith(f"{FOLDER}/") and not is_patient(nodeid)
