"""What an engine has done since it started: counters and distributions for metrics, apart from routing.

Goes out a few times a second beside the KV events, on the same socket under a topic of its own. Each report
holds totals and replaces the one before: losing one loses nothing. Nobody decides anything by it (`Load` in
`events.py` is for that), so it may be late.
On the wire: msgpack with strict types and a size cap, never pickle. The bounds of the distributions are part
of the format: only counts travel.
Knows numbers; knows no metric names (`router/fleet/engine_series.py`), no prompts and no request ids.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Annotated

import msgspec

from cache.errors import WireError
from cache.types import PinId
from cache.wire import WireFormat

FORMAT_VERSION = 9
MAX_REPORT_BYTES = 64 << 10  # a report has some 2 KB, and a pin 100 bytes
MAX_PINS = 256  # on one engine: told with every report

NonNegative = Annotated[int, msgspec.Meta(ge=0)]

# The bounds of vLLM's histograms of these names: quantiles on existing dashboards keep their meaning.
FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BOUNDS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
# Of structures: a mask takes some 10 us, compiling a millisecond; both have limits (`cache/structure.py`).
MASK_BOUNDS_S = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
COMPILE_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
REQUEST_BOUNDS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS_BOUNDS = tuple(map(float, (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)))
STEP_SEQUENCES_BOUNDS = tuple(map(float, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)))
# 1, 2, 5, 10 ... vLLM ends them at the model's length; these go as far as any model's.
REQUEST_TOKENS_BOUNDS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))[:-2]


class Distribution(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How many values fell where: a count per bound (values up to it), and one for what is above the last."""

    counts: tuple[NonNegative, ...]
    total: float  # sum of the values


class HeldPin(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A prefix that an engine holds, as it was asked to (`cache.messages.PinLease`)."""

    pin_id: Annotated[PinId, msgspec.Meta(max_length=64)]
    owner: Annotated[str, msgspec.Meta(max_length=64)]
    num_blocks: NonNegative
    copies: NonNegative
    created_at: float
    expires_at: float
    keeper: Annotated[str, msgspec.Meta(max_length=32)]


class EngineReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="report"):
    """One engine's totals since it started, and its state at one moment."""

    version: int
    epoch: NonNegative  # this life of the engine; as in its KV events
    number: NonNegative  # of this report in that life, from 1: a later one is never smaller in any counter

    # State.
    num_running: NonNegative
    num_waiting: NonNegative
    used_blocks: NonNegative  # referenced by a running sequence or a pin
    cached_blocks: NonNegative  # with a hash, so that a prompt may hit them
    total_blocks: NonNegative
    pinned_blocks: NonNegative  # of those in use, referenced by a pin; shared ones once
    max_pinned_blocks: NonNegative  # pins may have so many; 0 = none may be made here
    host_blocks: NonNegative  # slots of host memory in use, whatever for
    max_host_blocks: NonNegative  # 0 = it has none
    swapped_blocks: NonNegative  # of those in use, of requests put back into the queue
    pins: Annotated[tuple[HeldPin, ...], msgspec.Meta(max_length=MAX_PINS)]

    # Prompts, each counted once, when its first token is there: cached + computed = prompt tokens.
    prompt_tokens: NonNegative
    cached_prompt_tokens: NonNegative
    queried_tokens: NonNegative  # of those prompts, tokens looked up in the cache
    generated_tokens: NonNegative

    # Requests that are over, by how they ended.
    stopped: NonNegative  # end of sequence, stop string or stop id
    length_limited: NonNegative
    handed_over: NonNegative  # their replica leaves, and another goes on with them
    aborted: NonNegative  # cancelled, past their deadline, or not read
    failed: NonNegative  # their forward failed
    left_unread: NonNegative  # however many answers each had: its client did not read

    preemptions: NonNegative
    swapped: NonNegative  # of those, whose blocks were copied to host memory
    host_hits: NonNegative  # blocks found in host memory by a prompt and copied back
    host_declined: NonNegative  # blocks found there, and computed anew because that was cheaper
    host_saves: NonNegative  # blocks copied to host memory
    host_loads: NonNegative  # blocks copied back
    steps: NonNegative
    failed_steps: NonNegative
    computed_tokens: NonNegative  # of all steps; what was computed again after a preemption included
    decode_tokens: NonNegative  # of those, one at a time for answers; the others are parts of prompts
    mixed_steps: NonNegative  # steps with parts of prompts beside decodes
    cut_steps: NonNegative  # steps that could have held more of prompts, but for the decodes beside them
    early_steps: NonNegative  # that could have held more, but for the prompts that ended with them
    out_of_memory_steps: NonNegative  # taken back, and made smaller
    step_budget: NonNegative  # state: tokens that a step may have now

    # Seconds, on the engine's clock, from when the request reached this process.
    first_token_s: Distribution
    inter_token_s: Distribution  # between two tokens of a request
    # Of requests that came to an end of their own (stop or length).
    per_output_token_s: Distribution  # mean of a request's inter-token times
    request_s: Distribution
    queue_s: Distribution  # until first admitted
    prefill_s: Distribution  # from there to the first token
    decode_s: Distribution  # from there to the last
    inference_s: Distribution  # from admitted to the last
    prompt_length: Distribution  # tokens
    computed_length: Distribution  # tokens of prompts that were not in the cache
    output_length: Distribution  # tokens
    max_tokens: Distribution  # tokens asked for
    step_tokens: Distribution  # tokens computed in one step
    step_sequences: Distribution  # sequences in one step

    # Structures that answers had to have.
    compiled_structures: NonNegative  # those that are kept are not compiled again
    refused_structures: NonNegative  # of those, that cannot be followed
    compile_s: Distribution  # that one took, off the engine's thread
    mask_s: Distribution  # that one step spent on masks; steps without any do not count


BOUNDS: dict[str, tuple[float, ...]] = {
    "first_token_s": FIRST_TOKEN_BOUNDS_S,
    "inter_token_s": TOKEN_BOUNDS_S,
    "per_output_token_s": TOKEN_BOUNDS_S,
    "request_s": REQUEST_BOUNDS_S,
    "queue_s": REQUEST_BOUNDS_S,
    "prefill_s": REQUEST_BOUNDS_S,
    "decode_s": REQUEST_BOUNDS_S,
    "inference_s": REQUEST_BOUNDS_S,
    "prompt_length": REQUEST_TOKENS_BOUNDS,
    "computed_length": REQUEST_TOKENS_BOUNDS,
    "output_length": REQUEST_TOKENS_BOUNDS,
    "max_tokens": REQUEST_TOKENS_BOUNDS,
    "step_tokens": STEP_TOKENS_BOUNDS,
    "step_sequences": STEP_SEQUENCES_BOUNDS,
    "compile_s": COMPILE_BOUNDS_S,
    "mask_s": MASK_BOUNDS_S,
}
"""Of each `Distribution` in an `EngineReport`, by field name; ascending."""


class Tally:
    """A `Distribution` being counted. One thread only."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """O(log bounds)."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def distribution(self) -> Distribution:
        return Distribution(tuple(self._counts), self._total)


def encode_report(report: EngineReport) -> bytes:
    """The report as msgpack. Raises WireError if no receiver would take it."""
    return _FORMAT.encode(report)


def decode_report(wire: bytes) -> EngineReport:
    """Inverse of `encode_report`. Raises WireError, naming what is wrong, for everything else."""
    report = _FORMAT.decode(wire)
    check_report(report)
    return report


def check_report(report: EngineReport) -> None:
    """Raises WireError for what the types alone do not rule out."""
    if report.version != FORMAT_VERSION:
        raise WireError(f"engine report of format version {report.version}, not {FORMAT_VERSION}")
    if not all(math.isfinite(at) for pin in report.pins for at in (pin.created_at, pin.expires_at)):
        raise WireError("malformed engine report: a pin's time is not finite")
    for name, bounds in BOUNDS.items():
        distribution: Distribution = getattr(report, name)
        if len(distribution.counts) != len(bounds) + 1:
            raise WireError(f"malformed engine report: {name} has {len(distribution.counts)} counts")
        if not (math.isfinite(distribution.total) and distribution.total >= 0):
            raise WireError(f"malformed engine report: {name}.total is {distribution.total}")


_FORMAT = WireFormat(EngineReport, "engine report", version=FORMAT_VERSION, max_bytes=MAX_REPORT_BYTES)
