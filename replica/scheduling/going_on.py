"""Who goes on by a token before anybody has seen the one that is being drawn for it.

A device that is given the next step while it computes the present one never waits for the schedule. What such
a step may hold is what needs no answer of the present one: a decode of each sequence that is drawing a token,
where nothing but the token itself depends on it.

    present step   a: draws   b: draws, its last   c: draws
    next step      a: one     -                    c: one        then it turns out that c's token was a stop:
                                                                 what is computed of c is nobody's

Knows requests and what they asked for; knows neither blocks nor runners.
"""

from __future__ import annotations

from collections.abc import Sequence

from replica.scheduling.request import Request

# Steps begun unseen in a row while somebody waits: one that is planned may see room that came without
# anybody's end, by a merged block or by what answers are expected to grow to.
MOST_UNSEEN = 8


def going_on(step: Sequence[tuple[Request, int]]) -> list[Request]:
    """Of the requests of a step, with their tokens in it, those that decode in the one after it.

    Without those whose answer ends with this step by its length. None at all where one of them does not draw
    in this step, or draws what has to be looked at before anything follows.
    """
    found = []
    for request, num_tokens in step:
        if request.num_computed + num_tokens < len(request.token_ids) or must_be_seen(request):
            return []
        if request.num_output_tokens + 1 < request.max_output_tokens:
            found.append(request)
    return found


def must_be_seen(request: Request) -> bool:
    """Whether its next token has to be known before a step after it can be begun.

    What a structure allows and what penalties count follow from the tokens; log probabilities are read from
    this step's logits, whose place the next one takes; other answers and a held prompt begin where this step
    ends; and top-p reads from the device, in the middle of a draw, how flat the distribution is.
    """
    sampling = request.sampling
    return (
        request.structure is not None
        or request.logprobs is not None
        or request.lease is not None
        or bool(request.followers)
        or sampling.is_penalised
        or (sampling.top_p < 1 and sampling.temperature > 0)
    )
