"""One request's decision in words: where it went, why, what was expected, and what happened then.

Knows what `/debug/route` says; knows neither HTTP nor terminals. Every sentence follows from numbers in
the view: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterator

from router.insight.accounting import UncachedReason
from router.insight.debug_view import CandidateView, CostView, OutcomeView, RequestView, ShadowView
from router.placement.decision import RouteReason
from router.policies.expected_time import ExpectedTime

REASONS: dict[str, str] = {
    UncachedReason.COLD: "nobody is known to have computed them before",
    UncachedReason.EVICTED: "they had been cached once and were evicted since, or left with their replica",
    UncachedReason.ELSEWHERE: "another replica holds them",
    UncachedReason.STALE: "they were expected here, but the engine no longer had them",
    UncachedReason.OTHER_SALT: "they are cached under another cache_salt, or for another tenant, only",
    UncachedReason.DIVERGED: "they were computed before, but after something else",
    UncachedReason.PARTIAL: "they stand behind the last full block, which alone can be cached",
    UncachedReason.CAPPED: "the prompt ends with a full block, and at least one token must be computed",
}
_ENOUGH_S = 0.0005  # costs that differ by less are the same for a reader


def explain(request: RequestView) -> list[str]:
    """Paragraphs, in the order things happened."""
    return [
        " ".join(sentences)
        for sentences in (
            list(_what_came(request)),
            list(_where_it_went(request)),
            list(_what_it_would_cost(request)),
            list(_what_happened(request)),
            list(_what_the_shadow_says(request)),
        )
        if sentences
    ]


def tokens(count: int) -> str:
    """ "1 token", "1,980 tokens"."""
    return f"{count:,} token{'' if count == 1 else 's'}"


def seconds(value: float) -> str:
    """In milliseconds below a second: "24 ms", "1.31 s"."""
    if 0 < abs(value) < 0.001:
        return f"{value * 1000:.1f} ms"
    return f"{value * 1000:.0f} ms" if abs(value) < 1 else f"{value:.2f} s"


# --- the paragraphs -------------------------------------------------------------------------------


def _what_came(request: RequestView) -> Iterator[str]:
    full, rest = divmod(request.prompt_tokens, request.block_size)
    blocks = f"{full:,} full block{'' if full == 1 else 's'} of {request.block_size}"
    behind = f" and {rest} behind them" if rest else ""
    yield f"A prompt of {tokens(request.prompt_tokens)}: {blocks}{behind}."
    if request.held_s > _ENOUGH_S:
        yield f"It waited {seconds(request.held_s)} at the router until a replica was nearly free."
    if request.attempt > 1:
        yield f"This is attempt {request.attempt}; {_before(request.excluded)}."


def _where_it_went(request: RequestView) -> Iterator[str]:
    chosen, policy = request.candidates[0], request.policy
    share = f"{chosen.cached_tokens / request.prompt_tokens:.0%}"
    held = f"{tokens(chosen.cached_tokens)} of it ({share})"
    match request.reason:
        case RouteReason.PREFIX:
            yield f"{policy} sent it to {chosen.replica}, which was expected to hold {held}."
            yield from _out_of_reach(request) if _is_out_of_reach(request) else ("Nobody held more.",)
        case RouteReason.LOAD:
            yield f"{policy} sent it to {chosen.replica}, expected to hold {held}, although others held more."
            yield from _against_the_holder(request)
        case RouteReason.COLD:
            who = "Nobody that could be chosen" if _is_out_of_reach(request) else "Nobody"
            where = "where it would cost least: " if policy == ExpectedTime.name else "to "
            yield f"{who} held any of it, so {policy} sent it {where}{chosen.replica}."
            yield from _out_of_reach(request)
        case RouteReason.BLIND:
            yield (
                f"{policy} sent it to {chosen.replica} by load alone: what that replica caches was unknown "
                "(nothing heard of it for too long, or another model, block size or hash)."
            )
        case RouteReason.TURN:
            yield f"{policy} sent it to {chosen.replica}; that policy does not look at caches."
            if request.available_tokens > chosen.cached_tokens:
                yield (
                    f"The best match anywhere was {tokens(request.available_tokens)}; "
                    f"{chosen.replica} held {held}."
                )
        case other:
            yield f"{policy} sent it to {chosen.replica} ({other})."
    if request.copied_to is not None:
        yield (
            f"{request.copied_to}, sooner free, did not hold the first {tokens(request.hot_tokens)}, which "
            "many share: it was to compute those alone, for later requests, while this one went elsewhere."
        )
    guessed = chosen.cached_tokens - request.exact_tokens
    if guessed > 0:
        yield (
            f"{tokens(guessed)} of that the replica had not yet announced: they belong to a request "
            "sent there just before."
        )


def _is_out_of_reach(request: RequestView) -> bool:
    """Whether somebody that was no candidate held more than any that was, where the chosen one held most."""
    return request.available_tokens > request.candidates[0].cached_tokens


def _out_of_reach(request: RequestView) -> Iterator[str]:
    if _is_out_of_reach(request):
        yield (
            f"Some other replica held {tokens(request.available_tokens)}, but could not be chosen: "
            "it was draining, full or excluded, or takes no request of that length."
        )


def _against_the_holder(request: RequestView) -> Iterator[str]:
    """Why not the replica that held most."""
    chosen = request.candidates[0]
    holder = max(request.candidates, key=lambda candidate: candidate.cached_tokens)
    if holder.cached_tokens <= chosen.cached_tokens:
        return  # further down than is shown
    if chosen.terms is None or holder.terms is None:
        # Without speeds the default policy weighs tokens by requests; what others weigh is not known here.
        why = " but had more requests" if request.policy == ExpectedTime.name else ""
        yield f"{holder.replica} held {tokens(holder.cached_tokens)}{why}."
        return
    difference_s = holder.terms.total_s - chosen.terms.total_s
    compared = "more" if difference_s > 0 else "less by the default cost model"
    yield (
        f"{holder.replica} held {tokens(holder.cached_tokens)} and had {seconds(holder.terms.backlog_s)} of "
        f"other work ahead: it would have cost {seconds(abs(difference_s))} {compared}."
    )


def _what_it_would_cost(request: RequestView) -> Iterator[str]:
    chosen = request.candidates[0]
    if chosen.terms is None:
        yield "Its speed was not known yet, so no seconds were compared."
        return
    if request.policy != ExpectedTime.name:
        yield f"By the default cost model it would cost {_terms(request, chosen.terms)}."
        return
    yield f"Expected cost there: {_terms(request, chosen.terms)}."
    others = [c for c in request.candidates[1:] if c.terms is not None]
    if others:
        best = min(others, key=_total_s)
        assert best.terms is not None
        difference_s = best.terms.total_s - chosen.terms.total_s
        if abs(difference_s) <= _ENOUGH_S:
            yield f"{best.replica} would have cost the same; among equals the draw is random."
        elif difference_s > 0:
            yield (
                f"The next best, {best.replica}, would have cost {seconds(difference_s)} more"
                f"{_charge_of(request, best.terms)}."
            )
        else:
            yield (
                f"{best.replica} would have cost {seconds(-difference_s)} less: among near-ties the draw is "
                "random."
            )


def _terms(request: RequestView, terms: CostView) -> str:
    parts = [
        f"{seconds(terms.backlog_s)} behind other work",
        f"{seconds(terms.prefill_s)} of prefill",
    ]
    decodes_s = (terms.backlog_s + terms.prefill_s) * (terms.decode_slowdown - 1.0)
    if decodes_s > _ENOUGH_S:
        parts.append(f"{seconds(decodes_s)} for the sequences that decode beside it")
    if terms.recompute_s > _ENOUGH_S:
        parts.append(f"{seconds(terms.recompute_s)} charged for computing what caches could keep")
    if terms.recompute_s < -_ENOUGH_S:
        parts.append(f"{seconds(-terms.recompute_s)} less for a copy that others will use")
    if terms.passed_s > _ENOUGH_S:
        parts.append(f"{seconds(terms.passed_s)} that longer prompts in its queue would wait for it")
    if terms.preference_s < -_ENOUGH_S:
        parts.append(f"{seconds(-terms.preference_s)} less, as it is to be computed there in any case")
    if terms.preference_s > _ENOUGH_S:
        parts.append(f"{seconds(terms.preference_s)} charged {_why_others_are_preferred(request)}")
    if terms.alone_s > _ENOUGH_S:
        parts.append(f"{seconds(terms.alone_s)} that others on its machine would wait for steps of its own")
    if terms.memory_pressure_s > _ENOUGH_S:
        parts.append(f"{seconds(terms.memory_pressure_s)} for scarce memory")
    return f"{seconds(terms.total_s)} ({'; '.join(parts)})"


def _charge_of(request: RequestView, terms: CostView) -> str:
    if terms.preference_s <= _ENOUGH_S:
        return ""
    return f", {seconds(terms.preference_s)} of it charged {_why_others_are_preferred(request)}"


def _why_others_are_preferred(request: RequestView) -> str:
    if request.heir is None:
        return "as it is another Router's share"
    return f"as {request.heir} alone is to compute what it shares with other prompts"


def _what_happened(request: RequestView) -> Iterator[str]:
    outcome = request.outcome
    if outcome is None:
        if request.total_s is None:
            yield "It has no token yet."
        else:
            yield f"It ended after {seconds(request.total_s)} without a token."
        return
    yield from _findings(request, outcome)
    yield from _uncached(request, outcome)
    if request.first_token_s is not None:
        yield f"First token after {seconds(request.first_token_s)}."
    if request.rest_to is not None:
        yield (
            f"The answer was cut off after that; attempt {request.num_attempts} sent the rest to "
            f"{request.rest_to}."
        )
    if request.total_s is not None:
        yield f"{tokens(request.output_tokens)} out, over after {seconds(request.total_s)}."
    else:
        yield "It is still running."


def _findings(request: RequestView, outcome: OutcomeView) -> Iterator[str]:
    if outcome.replica != request.candidates[0].replica:
        yield f"{outcome.replica} took it instead."
    found = f"The engine found {tokens(outcome.delivered)} in its cache"
    missing = outcome.captured - outcome.delivered
    if missing == 0:
        yield f"{found}, as expected."
    elif missing > 0:
        yield f"{found}, {tokens(missing)} fewer than expected."
    else:
        yield f"{found}, {tokens(-missing)} more than expected."


def _uncached(request: RequestView, outcome: OutcomeView) -> Iterator[str]:
    computed = request.prompt_tokens - outcome.delivered
    if not outcome.uncached:
        return
    ordered = sorted(outcome.uncached.items(), key=lambda item: -item[1])
    reasons = "; ".join(f"{count:,} because {REASONS.get(reason, reason)}" for reason, count in ordered)
    yield f"It computed {tokens(computed)}: {reasons}."
    if outcome.parts_at_block is not None:
        first = outcome.parts_at_block * request.block_size
        where = f"tokens {first:,} to {first + request.block_size - 1:,} (block {outcome.parts_at_block})"
        yield (
            f"At {where} it parts from an earlier prompt that goes on with the same tokens: something there "
            "changes from request to request."
        )


def _what_the_shadow_says(request: RequestView) -> Iterator[str]:
    shadow = request.shadow
    if shadow is None:
        return
    if shadow.agrees:
        yield f"The shadow policy {shadow.policy} would have done the same."
    else:
        yield f"The shadow policy {shadow.policy} would have sent it to {shadow.replica}{_priced(shadow)}."


def _priced(shadow: ShadowView) -> str:
    held = f", which held {tokens(shadow.cached_tokens)}"
    if shadow.difference_s is None:
        return held
    if abs(shadow.difference_s) <= _ENOUGH_S:
        return f"{held}, at the same cost"
    dearer = "dearer" if shadow.difference_s > 0 else "cheaper"
    return f"{held}: {seconds(abs(shadow.difference_s))} {dearer} by the live cost model"


def _total_s(candidate: CandidateView) -> float:
    assert candidate.terms is not None
    return candidate.terms.total_s


def _before(excluded: list[str]) -> str:
    """Why there is another attempt."""
    if not excluded:  # nothing is wrong with a replica whose connection was lost
        return "what was answered before was lost on its way"
    return f"{' and '.join(excluded)} had refused or lost it"
