"""`python -m deploy serve` under other circumstances: what each driver changes is outside of the product.

    python -m tests.e2e.faults.two_nodes   on two Ray nodes, the GCS's state in Redis, and a supervisor for it
    python -m tests.e2e.faults.bad_wires   with KV events that get lost, late and out of order on their way,
                                           connections that are cut, engine threads that die

They take `deploy serve`'s arguments and print what it prints, so `tests.servers` can start either.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from deploy.__main__ import _parser, before_ray


def serve(argv: list[str], *, variables: Mapping[str, str], prepare: Callable[[], None]) -> int:
    """variables: beside the deployment's own, set before Ray is imported. prepare: called when it may be."""
    with before_ray(_parser().parse_args(argv)) as launch:
        os.environ.update(variables)
        prepare()
        return launch()
