"""The Mooncake trace format: one request per JSON line, its prompt as ids of 512-token blocks.

    {"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, ..., 13]}

`timestamp` is in milliseconds; an id names a block and everything before it. Source: the FAST '25 traces of
kvcache-ai/Mooncake (Apache-2.0). They carry no text, and their times are rounded to ticks of three seconds.
"""

from __future__ import annotations

from pathlib import Path

from loadtest.workloads.gaps import check_gap
from loadtest.workloads.json_lines import Line, read_lines
from loadtest.workloads.request import Workload, WorkRequest
from loadtest.workloads.sessions import find_sessions, shared_head

BLOCK_TOKENS = 512
MAX_TOKENS = 10_000_000  # of a prompt or an answer
MAX_TIME_MS = 366 * 86_400_000

_FIELDS = frozenset({"timestamp", "input_length", "output_length", "hash_ids"})


def read_mooncake(path: Path) -> Workload:
    """The whole trace; times count from its first request. Sessions are found from shared chains.

    Raises TraceError naming file, line and field: what is not a number in range, a wrong number of blocks, an
    id that follows different blocks in different places, times that run backwards, weeks without a request,
    no requests at all.
    """
    rows: list[tuple[float, int, int, tuple[int, ...]]] = []
    parents: dict[int, int | None] = {}
    last_ms = 0.0
    for line in read_lines(path):
        line.check_fields(_FIELDS)
        time_ms = line.real("timestamp", 0, MAX_TIME_MS)
        if time_ms < last_ms:
            raise line.error("timestamp", f"{time_ms:g} is before the line above it ({last_ms:g})")
        if rows:
            check_gap(line, "timestamp", (time_ms - last_ms) / 1e3)
        last_ms = time_ms
        input_tokens = line.integer("input_length", 1, MAX_TOKENS)
        output_tokens = line.integer("output_length", 1, MAX_TOKENS)
        rows.append((time_ms / 1e3, input_tokens, output_tokens, _chain(line, input_tokens, parents)))
    if not rows:
        raise Line(path, 0, {}).error(None, "holds no requests")
    chains = [chain for *_, chain in rows]
    sessions = find_sessions(chains, shared_head(chains))
    began_s = rows[0][0]
    return Workload(
        path.name.split(".")[0],
        BLOCK_TOKENS,
        tuple(
            WorkRequest(time_s - began_s, input_tokens, output_tokens, chain, session)
            for (time_s, input_tokens, output_tokens, chain), session in zip(rows, sessions, strict=True)
        ),
    )


def _chain(line: Line, input_tokens: int, parents: dict[int, int | None]) -> tuple[int, ...]:
    """The prompt's blocks, each seen after the same block as ever before."""
    field = "hash_ids"
    ids = line.list_of(field)
    needed = -(-input_tokens // BLOCK_TOKENS)
    if len(ids) != needed:
        raise line.error(field, f"lists {len(ids)} blocks, but input_length {input_tokens} fills {needed}")
    parent: int | None = None
    for block in ids:
        if isinstance(block, bool) or not isinstance(block, int) or block < 0:
            raise line.error(field, f"must list whole numbers from 0, not {block!r}")
        if parents.setdefault(block, parent) != parent:
            raise line.error(field, f"block {block} follows {parent} here but {parents[block]} further up")
        parent = block
    return tuple(ids)
