"""A Router on paper whose traffic is recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cache.types import RequestId
from router.config import RecordConfig
from router.insight.recording import TrafficRecorder
from router.insight.trace_files import FILE_PATTERN
from router.openai_api.prompt_text import PlainText
from router.placement.decision import RouteQuery
from router.placement.routing import Routing
from tests.fakes.router import FakeClock, chain, config, info, load, replica_id

SIZE = 16
PROMPT = PlainText("do not record me", "nor me")


class Bench:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.clock = FakeClock()
        self.recorder = TrafficRecorder(
            RecordConfig(folder=str(folder), **settings),
            block_size=SIZE,
            model_name="paper",
            clock=self.clock,
            wall_clock=lambda: 1_750_000_000.0,
        )
        self.routing = Routing(config(), clock=self.clock)
        self.routing.watch(self.recorder)
        self.routing.update_replicas({replica_id(0): info()})
        self.routing.on_load(replica_id(0), load())

    def serve(
        self,
        name: str,
        num_blocks: int,
        *,
        of: str = "",
        output: int = 3,
        outputs: Sequence[int] = (),
        **changes: Any,
    ) -> None:
        """One request from decision to end; `of`: whose prompt it repeats."""
        query = RouteQuery(RequestId(name), chain(of or name, num_blocks), num_blocks * SIZE + 5, **changes)
        self.routing.choose(query)
        self.routing.first_token(query.request_id, replica_id(0), 0)
        self.routing.finish(query.request_id, answers=outputs or (output,))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(folder.glob(FILE_PATTERN))
        for line in path.read_text().splitlines()
    ]
