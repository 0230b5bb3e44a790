"""What a request's newest tokens mean for its end: by its text, its length and its structure.

Knows requests and tokens; knows neither steps nor who is told.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache.errors import StructureRefused
from cache.messages import FinishReason
from replica.scheduling.request import Request
from replica.structures.matcher import StructureMatcher


def take_token(request: Request, token_id: int) -> FinishReason | None:
    """The request has this token: why it is the last one, or None. Raises StructureRefused."""
    reason, structure = request.detokenizer.push(token_id), request.structure
    if structure is None:
        return reason
    if reason is not FinishReason.STOP:  # by an end or a stop, which need not be part of the structure
        structure.advance(token_id)
    return _reason_to_end(request, structure, reason)


def take_tokens(request: Request, token_ids: Sequence[int]) -> FinishReason | None:
    """`take_token` for each until one is the last one, the text of many decoded at once."""
    structure = request.structure
    if structure is None:
        return request.detokenizer.push_all(token_ids)
    reason = request.detokenizer.push_all(token_ids[: _num_followed(structure, token_ids)])
    if reason is FinishReason.STOP:  # as above: the structure has gone on with what need not be part of it
        return reason
    return _reason_to_end(request, structure, reason)


def _num_followed(structure: StructureMatcher, token_ids: Sequence[int]) -> int:
    """How many tokens it goes on with, the one included with which it is over or fails."""
    for count, token_id in enumerate(token_ids, start=1):
        structure.advance(token_id)
        if structure.is_over or structure.failure is not None:
            return count
    return len(token_ids)


def _reason_to_end(
    request: Request, structure: StructureMatcher, reason: FinishReason | None
) -> FinishReason | None:
    """What `reason` becomes by where its structure is. Raises StructureRefused."""
    if (failure := structure.failure) is not None:
        raise StructureRefused(failure)
    return request.detokenizer.end() if structure.is_over else reason
