"""Who goes on in the next step before anybody has seen what the present one draws.

A device that is given the next step while it computes the present one never waits for the schedule. What such
a step may hold is what needs no answer of the present one: a decode of each sequence that is drawing a token,
where nothing but the token itself depends on it; and more of a prompt.

    present step   a: draws   b: draws, its last   c: draws   d: 512 of its prompt
    next step      a: one     -                    c: one     d: the next 509
    then it turns out that c's token was a stop: what is computed of c is nobody's

Knows requests and what they asked for; knows neither blocks nor runners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replica.scheduling.request import Request

# Steps begun unseen in a row while somebody waits: one that is planned may see room that came without
# anybody's end, by a merged block or by what answers are expected to grow to.
MOST_UNSEEN = 8


@dataclass(frozen=True, slots=True)
class NextPart:
    """One request's part of the next step."""

    request: Request
    start: int  # its tokens that are computed when the present step is done
    num_tokens: int
    is_drawn: bool  # it is the one token that the present step draws


@dataclass(frozen=True, slots=True)
class GoingOn:
    """Of the requests of a step, those that have something to compute in the next."""

    decodes: list[Request]
    prompts: list[tuple[Request, int]]  # in the middle of them, and what is computed when the step is done


def going_on(step: Sequence[tuple[Request, int]]) -> GoingOn | None:
    """step: requests and their tokens in it. Left out is whose answer ends with it by its length.

    None where one of them draws what has to be looked at before anything follows.
    """
    found = GoingOn([], [])
    for request, num_tokens in step:
        if must_be_seen(request):
            return None
        end = request.num_computed + num_tokens
        if end < len(request.token_ids):
            found.prompts.append((request, end))
        elif request.num_output_tokens + 1 < request.max_output_tokens:
            found.decodes.append(request)
    return found


def must_be_seen(request: Request) -> bool:
    """Whether its next token has to be known before a step after it can be begun.

    What a structure allows and what penalties count follow from the tokens; log probabilities are read from
    this step's logits, whose place the next one takes; other answers begin where this step ends, and a prompt
    that is only for the cache ends there.
    """
    return (
        request.structure is not None
        or request.logprobs is not None
        or request.for_cache
        or bool(request.followers)
        or request.sampling.is_penalised
    )
