"""What rank 0 and its followers write to each other through pipes: msgpack frames, length first.

    rank 0 → follower   Load, Meet, AllocatePages, then a Step for each step it computes itself; Close
    follower → rank 0   Loaded, Room; or, at any time, Refused or Failed, and then it ends

Knows frames and one step's plan; knows neither processes nor models.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import BinaryIO, TypeVar

import msgspec

from cache.messages import SamplingParams
from cache.types import RequestId
from replica.config import ReplicaConfig
from replica.output.logprob_log import LogprobLog
from replica.scheduling.runner import ScheduledSequence

_LENGTH_BYTES = 4


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load the model."""

    config: ReplicaConfig
    rank: int
    store: str  # a file's path, for `RankGroup`
    max_model_len: int
    dtype: str
    part_bytes: int  # of weights that a rank holds, at most


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Every rank has loaded: meet the others and keep this one's part."""


class AllocatePages(msgspec.Struct, frozen=True, tag=True):
    num_blocks: int  # the least that any rank has room for


class PlannedSequence(msgspec.Struct, frozen=True, array_like=True):
    """What of a `ScheduledSequence` a forward needs. Tokens and blocks: int32, as the machine has them."""

    request_id: str
    start: int
    num_tokens: int  # of the whole sequence
    num_prompt_tokens: int
    token_ids: bytes  # the new ones
    block_table: bytes  # as far as these tokens reach
    copy_source: int | None
    num_top: int | None  # of the prompt's log probabilities, where this step finds some


class Step(msgspec.Struct, frozen=True, tag=True):
    sequences: list[PlannedSequence]


class Close(msgspec.Struct, frozen=True, tag=True):
    pass


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The weights are there: this rank can meet the others."""


class Room(msgspec.Struct, frozen=True, tag=True):
    num_blocks: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It cannot serve its part: an error of ours, which says why."""

    reason: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Any other error, of which its traceback is in its log."""

    reason: str


Order = Load | Meet | AllocatePages | Step | Close
Answer = Loaded | Room | Refused | Failed

_encoder = msgspec.msgpack.Encoder()
orders = msgspec.msgpack.Decoder(Order)
answers = msgspec.msgpack.Decoder(Answer)
_Message = TypeVar("_Message")


def framed(message: Order | Answer) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def read(stream: BinaryIO, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message | None:
    """The next frame; None at the end of the stream, be it in the middle of one. Blocks."""
    header = stream.read(_LENGTH_BYTES)
    if len(header) < _LENGTH_BYTES:
        return None
    length = int.from_bytes(header, "little")
    body = stream.read(length)
    return decoder.decode(body) if len(body) == length else None


def planned(sequences: Sequence[ScheduledSequence], block_size: int) -> Step:
    """A step as followers hear of it. Every token must be known: none is `drawn_by` another step."""
    return Step([_planned(each, block_size) for each in sequences])


def scheduled(step: Step) -> list[ScheduledSequence]:
    """A step as followers compute it: no token is drawn, and those before the new ones are zeros."""
    return [_scheduled(each) for each in step.sequences]


def _planned(sequence: ScheduledSequence, block_size: int) -> PlannedSequence:
    assert sequence.drawn_by is None, "steps are not begun ahead of tokens that followers do not have"
    stop = sequence.start + sequence.num_new_tokens
    scores = sequence.logprobs is not None and sequence.logprobs.scores_prompt
    return PlannedSequence(
        sequence.request_id,
        sequence.start,
        len(sequence.token_ids),
        sequence.num_prompt_tokens,
        sequence.token_ids[sequence.start : stop].tobytes(),
        array("i", sequence.block_table[: -(-stop // block_size)]).tobytes(),
        sequence.copy_source,
        sequence.sampling.prompt_logprobs if scores else None,
    )


def _scheduled(plan: PlannedSequence) -> ScheduledSequence:
    new = array("i")
    new.frombytes(plan.token_ids)
    tokens = array("i", bytes(plan.num_tokens * new.itemsize))
    tokens[plan.start : plan.start + len(new)] = new
    blocks = array("i")
    blocks.frombytes(plan.block_table)
    return ScheduledSequence(
        request_id=RequestId(plan.request_id),
        token_ids=tokens,
        block_table=blocks.tolist(),
        start=plan.start,
        num_new_tokens=len(new),
        num_prompt_tokens=plan.num_prompt_tokens,
        sampling=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=plan.num_top),
        seed=0,
        copy_source=plan.copy_source,
        logprobs=None if plan.num_top is None else LogprobLog(num_scored=1),
    )
