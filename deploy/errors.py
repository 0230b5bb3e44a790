"""What can be wrong before anything starts. Part of the tree in `cache/errors.py`:

ConfigError                one setting: field, value, accepted range
└── UnknownKey             a key nobody reads; names the nearest one that is
ServingError
└── DeployError            the deployment as a whole
    ├── PortTaken          a port this deployment needs is in use
    ├── PortForbidden      this user may not listen on a port it needs
    ├── MachineLacks       this machine has not what the replicas ask of theirs
    ├── DeployFileError    deploy.yaml is missing or not what Serve reads
    ├── TimedOut           nothing is wrong but how much else runs on the machine
    │   ├── ClusterTimedOut    Ray was not up in its own time
    │   └── ProxyTimedOut      Serve's proxy was not ready in Serve's own time
    └── DeployFailed       Serve could not bring the application up
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from typing import ClassVar

from cache.counted import counted
from cache.errors import ConfigError, ServingError

TRY_AGAIN = os.EX_TEMPFAIL  # exit status where nothing is wrong but how much else runs: `TimedOut`


class UnknownKey(ConfigError):
    """A key that no part of the project reads. Serve itself would accept it in silence."""

    def __init__(self, field: str, key: str, known: Iterable[str]) -> None:
        names = sorted(known)
        nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]!r}?" if nearest else "known keys: " + ", ".join(names)
        ServingError.__init__(self, f"{field}: unknown key {key!r}; {hint}")
        self.field = field
        self.value = key
        self.accepted = hint


class DeployError(ServingError):
    """The deployment cannot start."""


class PortTaken(DeployError):
    def __init__(self, port: int, use: str) -> None:
        # Spans that begin a hundred ports away do not reach it.
        other = port + 100 if port + 200 <= 1 << 16 else port - 100
        super().__init__(f"port {port} ({use}) is in use; choose another base: make serve PORT={other}")
        self.port = port


class PortForbidden(DeployError):
    def __init__(self, port: int, use: str) -> None:
        super().__init__(
            f"this user may not listen on port {port} ({use}): systems keep low ports, mostly those below "
            "1024, to the administrator; choose a higher base, such as make serve PORT=8000"
        )
        self.port = port


class MachineLacks(DeployError):
    def __init__(self, missing: Sequence[str], *, counted_elsewhere: bool = True) -> None:
        """counted_elsewhere: the command that says it can check for a cluster instead."""
        hint = "; --gpus N and --cpus N check for a cluster" if counted_elsewhere else ""
        lines = "".join(f"\n- {each}" for each in missing)
        super().__init__(f"not on this machine{hint}{lines}")
        self.missing = tuple(missing)


class DeployFileError(DeployError):
    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")


class TimedOut(DeployError):
    """Of one of those below, whose `what` says what was not there in time."""

    what: ClassVar[str]

    def __init__(self, load: float, num_cpus: int) -> None:
        """load: the load average of the last minute."""
        super().__init__(
            f"{self.what}, which no setting raises; the load average is {load:.1f} on "
            f"{counted(num_cpus, 'CPU')}: start it again when less runs here"
        )


class ClusterTimedOut(TimedOut):
    what = "Ray did not start on this machine in its own time, 15 s for its helpers and 30 in all"


class ProxyTimedOut(TimedOut):
    what = "Serve's proxy was not ready in Serve's own time, 60 s"


class DeployFailed(DeployError):
    def __init__(self, reason: str) -> None:
        super().__init__(f"the application did not come up: {reason}")
