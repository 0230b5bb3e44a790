"""One request inside the engine: its tokens, its place in the schedule, its claim on the cache.

Mutable; owned by the engine thread. Knows token ids and counts; knows neither tensors nor sockets.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from cache.kv_cache_manager import SequenceBlocks
from cache.messages import FinishReason, GenerateRequest, PinLease, SamplingParams
from cache.priority import MAX_PRIORITY, MIN_PRIORITY
from cache.types import RequestId, pack_tokens
from replica.errors import InvalidRequest
from replica.output.detokenizer import Detokenizer
from replica.output.logprob_log import LogprobLog
from replica.scheduling.headroom import Growth
from replica.scheduling.layer_span import LayerSpan
from replica.structures.matcher import StructureMatcher


class RequestState(Enum):
    WAITING = "waiting"  # holds no blocks: not admitted yet, or preempted
    FOLLOWING = "following"  # holds no blocks: it starts where its leader's prompt is computed
    RUNNING = "running"  # holds blocks; part of every step the budget allows
    FINISHED = "finished"  # ended, failed or cancelled; holds no blocks


@dataclass(frozen=True, slots=True)
class Halfway:
    """The tokens after `Request.num_computed` that went through the first layers; their blocks are there."""

    num_tokens: int
    through: LayerSpan  # the latest


@dataclass(slots=True, eq=False)
class Request:
    """What the scheduler and the engine know of one request.

    [0, num_computed) K/V in its blocks   [num_computed, len(token_ids)) to compute
    [0, num_prompt_tokens) prompt         [num_prompt_tokens, len(token_ids)) output, older attempts' included

    Several answers to one prompt are as many requests: the first leads, and the others follow it until it
    has computed the prompt for all of them.
    """

    request_id: RequestId
    token_ids: array[int]  # grows by one per sampled token; shared with `blocks.token_ids`
    num_prompt_tokens: int
    max_output_tokens: int  # `max_tokens`, cut to what the model's length limit leaves
    sampling: SamplingParams
    seed: int
    arrival_s: float  # engine clock
    expires_s: float | None  # engine clock; None = never
    blocks: SequenceBlocks
    detokenizer: Detokenizer
    state: RequestState = RequestState.WAITING
    num_computed: int = 0
    cached_tokens: int | None = None  # prompt tokens from the cache at first admission; None before
    expected_hit: int = 0  # cached tokens at submission: an estimate while waiting
    num_preemptions: int = 0
    waited_s: float = 0.0  # at a Router, before it arrived: its place counts them
    finish_reason: FinishReason | None = None
    admitted_s: float | None = None  # engine clock: some of its prompt first taken into a step; None before
    # Engine clock, None before: for metrics and traces, nothing is decided by them.
    first_token_s: float | None = None  # of those sampled here
    last_token_s: float | None = None
    num_earlier_tokens: int = 0  # output of earlier attempts, on other replicas
    goes_on: bool = False  # with an answer that its client has the beginning of, its own or one beside it
    traceparent: str = ""  # of the span it is done under; "" = nobody traces
    lease: PinLease | None = None  # its prompt is to be held
    for_cache: bool = False  # its prompt is all there is to compute: it ends with that, as what is held does
    logprobs: LogprobLog | None = None  # found and not sent yet; None = nobody asked
    is_scored: bool = False  # log probabilities of its prompt are found here: it is computed whole
    choice: int = 0  # which of the answers to its prompt
    followers: list[Request] = field(default_factory=list)  # that begin where its prompt is computed
    has_followed: bool = False  # its prompt was computed for another answer to it
    tenant: str = ""  # whose turn it uses
    share: float = 1.0  # its tenant's, above 0
    priority: int = 0  # among its tenant's; least goes first (`cache/priority.py`)
    starts_by_s: float = math.inf  # engine clock: begun later, its first token would come too late
    place: tuple[float, int] = (0.0, 0)  # in the queue's order, for as long as it is here; no two are equal
    halfway: Halfway | None = None  # the part of its prompt that has been through some of the layers
    num_charged: int = 0  # leading tokens that its tenant has been charged for, or that were found cached
    growth: Growth | None = None  # as it was last found
    growth_in: tuple[int, int, int, int] = (0, 0, 0, 0)  # the situation it was found in (`Admission`)
    structure: StructureMatcher | None = None  # where its output is in what it has to be; None = it is free

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """One token a step from here on: the last one sampled is all there is to compute."""
        return self.num_uncomputed == 1 and self.num_computed > 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_here(self) -> int:
        """Output tokens sampled by this engine, an earlier attempt's not counted."""
        return self.num_output_tokens - self.num_earlier_tokens


def check_request(request: GenerateRequest, vocab_size: int) -> None:
    """Raise InvalidRequest for values that would make a step fail for its innocent neighbours too.

    The router's edge validates what clients send; this guards the batch against everything else.
    """
    tokens = request.token_ids
    if not tokens:
        raise InvalidRequest("token_ids", "the prompt is empty")
    if not 1 <= request.num_prompt_tokens <= len(tokens):
        raise InvalidRequest(
            "num_prompt_tokens", f"{request.num_prompt_tokens} is not between 1 and {len(tokens)}"
        )
    ids = np.frombuffer(tokens, dtype=np.int32)  # a hundred times as fast as asking each for itself
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise InvalidRequest("token_ids", f"ids must be between 0 and {vocab_size - 1}")
    if request.adapter:
        raise InvalidRequest("adapter", f"this replica serves no adapter named {request.adapter!r}")
    if not MIN_PRIORITY <= request.priority <= MAX_PRIORITY:
        raise InvalidRequest(
            "priority", f"{request.priority} is not between {MIN_PRIORITY} and {MAX_PRIORITY}"
        )
    if not 0.0 < request.share < math.inf:
        raise InvalidRequest("share", f"{request.share} is not a finite number above 0")
    if not 0.0 <= request.waited_s < math.inf:  # the waiting are sorted by it: NaN would undo their order
        raise InvalidRequest("waited_s", f"{request.waited_s} is not a finite number of seconds, 0 or more")
    if request.sent_chars < 0:
        raise InvalidRequest("sent_chars", f"{request.sent_chars} is negative")


def copy_tokens(token_ids: array[int]) -> array[int]:
    """The engine's own copy, which it appends to; also settles what pickling may have made of it."""
    return pack_tokens(token_ids)
