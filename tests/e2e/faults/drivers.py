"""`python -m deploy serve` under other circumstances: what each driver changes is outside of the product.

    python -m tests.e2e.faults.two_nodes   on two Ray nodes, the GCS's state in Redis, and a supervisor for it
    python -m tests.e2e.faults.bad_wires   with KV events that get lost, late and out of order on their way,
                                           connections that are cut, engine threads that die

They take `deploy serve`'s arguments and print what it prints, so `tests.servers` can start either.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from deploy.__main__ import _parser
from deploy.environment import fast_proxy_installed, run_parent, serve_environment
from deploy.ports import Ports


def serve(argv: list[str], *, variables: Mapping[str, str], prepare: Callable[[], None]) -> int:
    """variables: beside the deployment's own, set before Ray is imported. prepare: called when it may be."""
    arguments = _parser().parse_args(argv)
    fast = arguments.proxy == "fast" or (arguments.proxy == "auto" and fast_proxy_installed())
    ports = Ports(arguments.port)
    with tempfile.TemporaryDirectory(
        prefix="warmpath-", dir=run_parent(), ignore_cleanup_errors=True
    ) as folder:
        os.environ.update(serve_environment(ports, Path(folder), fast_proxy=fast))
        os.environ.update(variables)
        prepare()
        from deploy.launcher import launch

        return launch(
            arguments.file,
            ports,
            Path(folder),
            fast_proxy=fast,
            ray_dashboard=arguments.ray_dashboard,
            verbose=arguments.verbose,
        )
