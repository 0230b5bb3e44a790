"""What the pieces of a delta channel carry: a generation's deltas, from a replica to the Router that asked.

Knows deltas and bytes; knows no sockets (`cache/channel/`).
"""

from __future__ import annotations

import msgspec

from cache.channel.frames import MAX_PIECE_BYTES, NonNegative, PieceFormat, frame
from cache.errors import WireError
from cache.messages import Delta, FinishReason
from cache.wire import within


class DeltaPiece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A delta without logprobs: calls that ask for those are answered by Serve."""

    stream: NonNegative
    number: NonNegative  # 0, 1, 2, ... within its stream
    text: str
    token_ids: tuple[NonNegative, ...]
    cached_tokens: NonNegative
    finish_reason: FinishReason | None
    choice: NonNegative

    @property
    def content(self) -> Delta:
        return Delta(self.text, self.token_ids, self.cached_tokens, self.finish_reason, choice=self.choice)


_ENCODER = msgspec.msgpack.Encoder()
_PIECES = msgspec.msgpack.Decoder(DeltaPiece)


def piece(stream: int, number: int, delta: Delta) -> bytes:
    """Raises WireError for a delta that has logprobs, or is larger than a receiver takes."""
    if delta.logprobs is not None or delta.prompt_logprobs is not None:
        raise WireError("logprobs do not travel on a delta channel")
    message = DeltaPiece(
        stream,
        number,
        delta.text,
        delta.token_ids,
        delta.cached_tokens,
        delta.finish_reason,
        delta.choice,
    )
    try:
        return frame(within(_ENCODER.encode(message), MAX_PIECE_BYTES, "piece"))
    except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeError) as error:
        raise WireError(f"cannot encode piece: {type(error).__name__}") from error


def read_piece(message: bytes) -> DeltaPiece:
    """Raises WireError."""
    try:
        return _PIECES.decode(message)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise WireError(f"malformed piece: {error}") from error


DELTAS: PieceFormat[Delta] = PieceFormat(piece, read_piece)
