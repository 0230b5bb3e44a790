"""The service's own recordings (`record:` in deploy.yaml): times, lengths and keyed block ids, no text.

    {"format": "warmpath-trace", "version": 2, ...}
    {"t": 12.25, "input": 812, "output": 64, "blocks": ["9f…", ...], "block_size": 16, "session": "…"}
    {"t": 12.5, "input": 90, "refused": true, "blocks": ["9f…", ...], "block_size": 16}
    {"t": 13.0, "input": 90, "n": 2, "outputs": [64, 21], "blocks": ["9f…", ...], "block_size": 16}

`blocks` names the prompt's *full* blocks, each id standing for everything up to there; `session` may be
absent, then sessions are found from shared chains. Written by `router/insight/recording.py`; lines may be
out of order, since a request is written when it ends; `cat traffic-*.jsonl` is a recording too. The header
names the key that ids were made with; what prompts of two keys share is not known, so how many there are is
told with the workload.
A request that was refused came all the same; its answer is taken to be as long as the others' are on average,
which keeps what there is to generate per request. Version 1 had none of them.
Of `n` answers to a prompt each becomes a request of the same session, blocks and time: an engine computes
the prompt once and finds it cached for the others.
Knows no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from loadtest.workloads.gaps import check_gap
from loadtest.workloads.json_lines import Line, read_lines
from loadtest.workloads.request import Workload, WorkRequest
from loadtest.workloads.sessions import find_sessions, shared_head

FORMAT = "warmpath-trace"
VERSIONS = (1, 2)  # the oldest and the newest that are read
MAX_TOKENS = 10_000_000  # of a prompt or an answer
MAX_TIME_S = 1e11  # both a monotonic clock and seconds since 1970 fit
MAX_BLOCK_TOKENS = 1024  # what a replica accepts as block_size
MAX_PARTS = 1_000_000_000
MAX_ANSWERS = 1_000_000  # to one prompt: the most that `limits.max_answers` allows

_REQUIRED = frozenset({"t", "input", "blocks", "block_size"})
_SERVED, _REFUSED = _REQUIRED | {"output"}, _REQUIRED | {"refused"}
_SEVERAL = _REQUIRED | {"n", "outputs"}
_OPTIONAL = frozenset({"session"})


@dataclass(frozen=True, slots=True)
class _Row:
    line_number: int
    time_s: float
    input_tokens: int
    n: int  # answers
    outputs: tuple[int, ...] | None  # tokens of each; None: it was refused
    chain: tuple[int, ...]  # the last, partial block included
    session: str | None


def read_recording(path: Path) -> Workload:
    """The whole recording; times count from its first request.

    Raises TraceError naming file, line and field: an unknown version, what is not a number in range, a
    wrong number of blocks, an id that follows different blocks in different places, a second block size, a
    part whose header says when it began beside one whose header does not, a part that is there twice, weeks
    without a request, no requests at all.
    """
    lines = read_lines(path)
    parts: dict[tuple[str, int], int] = {}
    header = next(lines, None)
    started_at, key = _header(path, header)
    if header is not None:
        _note_part(header, parts)
    keys = {key}
    is_dated = started_at is not None
    ids = _BlockIds()
    rows: list[_Row] = []
    block_tokens = 0
    for line in lines:
        if "format" in line:  # several files, put together: each opens with a header
            started_at, key = _header(path, line)
            _note_part(line, parts)
            keys.add(key)
            if (started_at is not None) != is_dated:
                told = "is missing here, but given" if is_dated else "is given here, but missing"
                raise line.error("started_at", f"{told} further up: nobody knows how far apart the two are")
            continue
        if "refused" in line:
            line.check_fields(_REFUSED, _OPTIONAL | {"n"})
        else:
            line.check_fields(_SEVERAL if "n" in line or "outputs" in line else _SERVED, _OPTIONAL)
        size = line.integer("block_size", 1, MAX_BLOCK_TOKENS)
        if size != (block_tokens or size):
            raise line.error("block_size", f"is {size} here but {block_tokens} further up")
        block_tokens = size
        rows.append(_row(line, started_at or 0.0, block_tokens, ids))
    if not rows:
        raise Line(path, 0, {}).error(None, "holds no requests")
    rows.sort(key=lambda row: row.time_s)
    for before, row in pairwise(rows):
        check_gap(Line(path, row.line_number, {}), "t", row.time_s - before.time_s)
    return Workload(path.name.split(".")[0], block_tokens, _requests(rows), num_keys=len(keys))


def _header(path: Path, header: Line | None) -> tuple[float | None, str]:
    """When that recording began, so that those of several Routers and runs can be put together, and the name
    of its key; older ones have neither."""
    if header is None or "format" not in header:
        raise Line(path, 1, {}).error("format", f"is missing: a recording opens with its header, {FORMAT!r}")
    if header.string("format") != FORMAT:
        raise header.error("format", f"must be {FORMAT!r}")
    if "version" not in header:
        raise header.error("version", "is missing")
    header.integer("version", *VERSIONS)
    started_at = header.real("started_at", 0, MAX_TIME_S) if "started_at" in header else None
    return started_at, header.string("key") if "key" in header else ""


def _note_part(header: Line, parts: dict[tuple[str, int], int]) -> None:
    """Its requests would come twice. parts: the lines of those seen. Oldest recordings do not name them."""
    if "recording" not in header or "part" not in header:
        return
    recording, part = header.string("recording"), header.integer("part", 1, MAX_PARTS)
    before = parts.setdefault((recording, part), header.number)
    if before != header.number:
        raise header.error(
            "part", f"{part} of recording {recording!r} is there already, from line {before} on"
        )


def _row(line: Line, offset_s: float, block_tokens: int, ids: _BlockIds) -> _Row:
    time_s = offset_s + line.real("t", 0, MAX_TIME_S)
    input_tokens = line.integer("input", 1, MAX_TOKENS)
    n = line.integer("n", 2, MAX_ANSWERS) if "n" in line else 1
    outputs = None
    if "refused" not in line:
        outputs = _outputs(line, n)
    elif not line.is_true("refused"):
        raise line.error("refused", "must be true, or left out")
    full = line.list_of("blocks")
    if len(full) != input_tokens // block_tokens:
        raise line.error(
            "blocks",
            f"lists {len(full)} blocks, but {input_tokens} tokens fill {input_tokens // block_tokens}",
        )
    chain = ids.chain(line, full)
    if input_tokens % block_tokens:
        chain += (ids.fresh(),)  # nobody shares a partial block
    return _Row(
        line.number,
        time_s,
        input_tokens,
        n,
        outputs,
        chain,
        line.string("session") if "session" in line else None,
    )


def _outputs(line: Line, n: int) -> tuple[int, ...]:
    """Tokens of each answer: one that ended before its first has had its prompt computed all the same."""
    if n == 1:
        return (max(1, line.integer("output", 0, MAX_TOKENS)),)
    outputs = line.integers("outputs", 0, MAX_TOKENS)
    if len(outputs) != n:
        raise line.error("outputs", f"lists {len(outputs)} answers, but n is {n}")
    return tuple([max(1, output) for output in outputs])


class _BlockIds:
    """Hexadecimal names as small numbers, each always after the same block."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int | None]] = {}  # name: number, the number it follows
        self._num_ids = 0

    def fresh(self) -> int:
        self._num_ids += 1
        return self._num_ids - 1

    def chain(self, line: Line, names: list[object]) -> tuple[int, ...]:
        parent: int | None = None
        numbers: list[int] = []
        for name in names:
            if not isinstance(name, str) or not name or set(name) - set("0123456789abcdef"):
                raise line.error("blocks", f"must list lower-case hexadecimal ids, not {name!r}")
            known = self._known.get(name)
            if known is None:
                known = self._known[name] = (self.fresh(), parent)
            if known[1] != parent:
                raise line.error("blocks", f"block {name} follows another block here than further up")
            parent = known[0]
            numbers.append(parent)
        return tuple(numbers)


def _requests(rows: list[_Row]) -> tuple[WorkRequest, ...]:
    chains = [row.chain for row in rows]
    found = find_sessions(chains, shared_head(chains))
    named: dict[str, int] = {}
    num_found = max(found) + 1
    began_s = rows[0].time_s
    known = [output for row in rows for output in row.outputs or ()]
    usual = round(sum(known) / len(known)) if known else 1
    return tuple(
        WorkRequest(
            arrival_s=row.time_s - began_s,
            input_tokens=row.input_tokens,
            output_tokens=output,
            block_ids=row.chain,
            session=number if row.session is None else named.setdefault(row.session, num_found + len(named)),
            was_refused=row.outputs is None,
            branch=branch,
        )
        for row, number in zip(rows, found, strict=True)
        for branch, output in enumerate(row.outputs or (usual,) * row.n)
    )
