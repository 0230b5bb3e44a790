"""A driver: KV events pass a relay, which loses, repeats, delays and reorders them; so do deltas, whose
connections it ends (`delta_relay.py`); and an engine's thread dies when told to (`mortal_engine.py`).

    replica's PUB ──> relay, a thread in the replica's process ──> every Router's SUB

The product knows nothing of it: a subclass here announces the relays' addresses in place of its own.
How bad the wire is stands in a file that the test writes, `Wire` as JSON; beside it each relay leaves where
its replica answers snapshot requests, for whoever wants to compare.
"""

from __future__ import annotations

import heapq
import itertools
import json
import logging
import os
import random
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.e2e.faults.delta_relay import DeltaRelay
from tests.e2e.faults.drivers import serve
from tests.e2e.faults.mortal_engine import Murderer

FOLDER_VARIABLE = "WARMPATH_TEST_WIRES"  # where the file and the addresses are
_POLL_MS = 20

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Wire:
    """What may happen to a message; shares of all messages."""

    lost: float = 0.0
    repeated: float = 0.0
    delayed: float = 0.0
    delay_s: float = 0.0  # at most: later messages overtake

    def write(self, folder: Path) -> None:
        """From now on every relay is like this."""
        new = folder / "wire.new"
        new.write_text(json.dumps(asdict(self)))
        new.rename(folder / "wire.json")

    @classmethod
    def read(cls, folder: Path) -> Wire:
        """The present one; a perfect one if none was written."""
        try:
            return cls(**json.loads((folder / "wire.json").read_text()))
        except FileNotFoundError:
            return cls()


class Relay(threading.Thread):
    """One publisher's messages, passed on more or less. Lives as long as the process."""

    def __init__(self, source: str, folder: Path) -> None:
        super().__init__(name="relay", daemon=True)
        import zmq

        self._folder = folder
        self._context: Any = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(source)
        self._pub = self._context.socket(zmq.PUB)
        port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._random = random.Random(os.getpid())
        self._order = itertools.count()
        self._held: list[tuple[float, int, list[bytes]]] = []  # (when to send, order, frames)

    def run(self) -> None:
        while True:
            wire = Wire.read(self._folder)
            if self._sub.poll(_POLL_MS):
                self._take(self._sub.recv_multipart(), wire)
            while self._held and self._held[0][0] <= time.monotonic():
                self._pub.send_multipart(heapq.heappop(self._held)[2])

    def _take(self, frames: list[bytes], wire: Wire) -> None:
        draw = self._random
        if draw.random() < wire.lost:
            return
        for _ in range(2 if draw.random() < wire.repeated else 1):
            if draw.random() < wire.delayed:
                due_s = time.monotonic() + draw.uniform(0, wire.delay_s)
                heapq.heappush(self._held, (due_s, next(self._order), frames))
            else:
                self._pub.send_multipart(frames)


def build(arguments: dict[str, Any]) -> Any:
    """`deploy.app.build` with relays."""
    import deploy.app

    deploy.app.Replica = deploy.app.Replica.options(func_or_class=_relayed_replica())
    return deploy.app.build(arguments)


def _relayed_replica() -> type:
    from deploy.app import NodeReplica

    class RelayedReplica(NodeReplica):
        """Announces its relays in place of its own sockets."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            folder = Path(os.environ[FOLDER_VARIABLE])
            relay = Relay(self._info.event_endpoint, folder)
            relay.start()
            deltas = DeltaRelay(self._info.delta_endpoint, folder)
            deltas.start()
            self._info = replace(self._info, event_endpoint=relay.address, delta_endpoint=deltas.address)
            Murderer(self._engine._thread, folder).start()
            (folder / f"{os.getpid()}.address").write_text(self._info.snapshot_endpoint)

    return RelayedReplica


def main(argv: list[str]) -> int:
    folder = Path(os.environ["RAY_TMPDIR"]) / "wires"
    folder.mkdir()
    file = next(Path(each) for each in argv if each.endswith(".yaml"))

    def prepare() -> None:
        import deploy.serve_file

        ours = f"{__name__ if __name__ != '__main__' else 'tests.e2e.faults.bad_wires'}:build"
        file.write_text(file.read_text().replace(deploy.serve_file.IMPORT_PATH, ours))
        deploy.serve_file.IMPORT_PATH = ours

    return serve(argv, variables={FOLDER_VARIABLE: str(folder)}, prepare=prepare)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
