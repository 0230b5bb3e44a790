"""Explanations say what the numbers say: one request worked out by hand, then what changes the words."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.insight.accounting import UncachedReason
from router.insight.debug_view import CandidateView, CostView, OutcomeView, RequestView, ShadowView
from router.insight.explanation import REASONS, explain, seconds, tokens
from router.placement.decision import RouteReason
from router.pricing.cost import CostTerms


def cost(backlog_s: float, prefill_s: float, recompute_s: float = 0.0, slowdown: float = 1.0) -> CostView:
    total_s = (backlog_s + prefill_s) * slowdown + recompute_s
    return CostView(
        backlog_s, prefill_s, slowdown, recompute_s, alone_s=0.0, memory_pressure_s=0.0, total_s=total_s
    )


def candidate(replica: str, cached: int, terms: CostView | None) -> CandidateView:
    return CandidateView(replica, cached, True, 1, 0, 0, terms.total_s if terms else None, terms)


# The example of README.md, "How routing decides".
HOLDER = candidate("A", 1952, cost(0.40, 0.01, 0.01))
IDLE = candidate("B", 0, cost(0.0, 0.59, 0.59))
FOUND = OutcomeView("A", 1952, 1952, 1952, {"partial_block": 12, "cold": 16}, None)
REQUEST = RequestView(
    request_id="r",
    policy="expected_time",
    reason="prefix",
    prompt_tokens=1980,
    block_size=16,
    hot_tokens=0,
    recompute_weight=2.0,
    held_s=0.0,
    attempt=1,
    num_attempts=1,
    rest_to=None,
    excluded=[],
    num_candidates=2,
    candidates=[HOLDER, IDLE],
    available_tokens=1952,
    exact_tokens=1952,
    outcome=FOUND,
    first_token_s=0.43,
    total_s=1.31,
    output_tokens=8,
    shadow=None,
)


def text(**changes: object) -> str:
    return "\n".join(explain(msgspec.structs.replace(REQUEST, **changes)))


def test_a_prefix_hit_is_told_from_arrival_to_end() -> None:
    assert explain(REQUEST) == [
        "A prompt of 1,980 tokens: 123 full blocks of 16 and 12 behind them.",
        "expected_time sent it to A, which was expected to hold 1,952 tokens of it (99%). Nobody held more.",
        "Expected cost there: 420 ms (400 ms behind other work; 10 ms of prefill; 10 ms charged for "
        "computing what caches could keep). The next best, B, would have cost 760 ms more.",
        "The engine found 1,952 tokens in its cache, as expected. It computed 28 tokens: "
        f"16 because {REASONS['cold']}; 12 because {REASONS['partial_block']}. "
        "First token after 430 ms. 8 tokens out, over after 1.31 s.",
    ]


def test_a_load_decision_says_what_waiting_would_have_cost() -> None:
    busy = candidate("A", 1952, cost(1.30, 0.01, 0.01))
    told = text(reason="load", candidates=[IDLE, busy], exact_tokens=0)
    assert "although others held more" in told
    assert "A held 1,952 tokens and had 1.30 s of other work ahead: it would have cost 140 ms more." in told


def test_the_parts_of_a_cost_sum_to_it_beside_decodes() -> None:
    """Worked by hand: 400 ms behind others and 30 of prefill, in steps that also decode for 70 ms."""
    terms = CostTerms(0.4, 0.03, (0.4 + 0.03 + 0.07) / (0.4 + 0.03), 0.02, 0.0, 0.0, 0.01)
    told = text(candidates=[candidate("A", 1952, CostView(**terms._asdict(), total_s=terms.total_s))])
    assert (
        "530 ms (400 ms behind other work; 30 ms of prefill; 70 ms for the sequences that decode beside it; "
        "20 ms charged for computing what caches could keep; 10 ms for scarce memory)"
    ) in told


@given(st.lists(st.integers(1, 5000), min_size=7, max_size=7), st.booleans())
def test_the_parts_of_any_cost_sum_to_it(parts_ms: list[int], is_a_copy: bool) -> None:
    backlog, prefill, decodes, recompute, passed, alone, memory = [ms / 1000 for ms in parts_ms]
    slowdown = 1.0 + decodes / (backlog + prefill)
    terms = CostTerms(
        backlog, prefill, slowdown, -recompute if is_a_copy else recompute, passed, alone, memory
    )
    told = text(candidates=[candidate("A", 1952, CostView(**terms._asdict(), total_s=terms.total_s))])
    matched = re.search(r"Expected cost there: (.*?) \((.*?)\)", told)
    assert matched is not None
    total, *parts = [_read_s(part) for part in (matched[1], *matched[2].split("; "))]
    assert sum(parts) == pytest.approx(total, abs=0.005 * (len(parts) + 1))


def _read_s(part: str) -> float:
    number, unit, *words = part.split()
    value_s = float(number) / (1000 if unit == "ms" else 1)
    return -value_s if words[:1] == ["less"] else value_s


def test_who_waits_for_it_is_part_of_the_cost() -> None:
    terms = msgspec.structs.replace(cost(0.40, 0.01), passed_s=0.02, total_s=0.43)
    told = text(candidates=[candidate("A", 1952, terms), IDLE])
    assert "; 20 ms that longer prompts in its queue would wait for it)" in told
    assert "longer prompts" not in text()


def test_that_others_are_preferred_is_part_of_the_cost() -> None:
    dearer = msgspec.structs.replace(cost(0.0, 0.59, 0.59), preference_s=0.5, total_s=1.68)
    kept_from = [HOLDER, candidate("B", 0, dearer)]
    told = text(candidates=kept_from)
    assert "cost 1.26 s more, 500 ms of it charged as it is another Router's share." in told
    told = text(candidates=kept_from, heir="A")
    assert "500 ms of it charged as A alone is to compute what it shares with other prompts." in told
    assert "; 500 ms charged as it is another Router's share)" in text(candidates=kept_from[::-1])


def test_an_heir_is_not_charged_who_waits_for_it() -> None:
    terms = msgspec.structs.replace(cost(0.40, 0.01), passed_s=0.02, preference_s=-0.02)
    told = text(candidates=[candidate("A", 1952, terms)], heir="A")
    assert "20 ms that longer prompts in its queue would wait for it; 20 ms less, as it is to be" in told


def test_a_copy_that_was_made_beside_it_is_told() -> None:
    told = text(copied_to="B", hot_tokens=1904)
    assert "B, sooner free, did not hold the first 1,904 tokens, which many share: it was to" in told
    assert "many share" not in text()


def test_a_copy_that_others_will_use_costs_less() -> None:
    assert "; 100 ms less for a copy that others will use)" in text(
        candidates=[candidate("B", 0, cost(0.0, 0.59, -0.1))]
    )


def test_a_draining_holder_is_not_among_the_candidates() -> None:
    told = text(candidates=[candidate("C", 160, cost(0.0, 0.5))], available_tokens=1952, exact_tokens=160)
    assert "Some other replica held 1,952 tokens, but could not be chosen" in told


@pytest.mark.parametrize(
    ("reason", "words"),
    [("cold", "held any of it, so"), ("blind", "by load alone"), ("turn", "does not look at caches")],
)
def test_other_reasons_have_words_of_their_own(reason: str, words: str) -> None:
    assert words in text(reason=reason, candidates=[IDLE, HOLDER], exact_tokens=0)


def test_a_cold_decision_does_not_deny_a_holder_that_could_not_be_chosen() -> None:
    told = text(reason="cold", candidates=[IDLE], exact_tokens=0)
    assert "Nobody that could be chosen held any of it" in told
    assert "Some other replica held 1,952 tokens, but could not be chosen" in told
    alone = text(reason="cold", candidates=[IDLE], exact_tokens=0, available_tokens=0)
    assert "Nobody held any of it, so expected_time sent it where it would cost least: B." in alone
    assert "could not be chosen" not in alone


def test_what_other_policies_weigh_is_not_guessed() -> None:
    unpriced = [candidate("B", 0, None), candidate("A", 1952, None)]
    assert "A held 1,952 tokens but had more requests." in text(reason="load", candidates=unpriced)
    assert "A held 1,952 tokens." in text(reason="load", candidates=unpriced, policy="preble")
    cold = {"reason": "cold", "candidates": [IDLE], "available_tokens": 0}
    assert "so preble sent it to B." in text(**cold, policy="preble")


def test_every_reason_of_a_decision_and_of_a_token_is_worded() -> None:
    assert set(REASONS) == {reason.value for reason in UncachedReason}
    for reason in RouteReason:
        assert f"({reason.value})" not in text(reason=reason.value)


def test_a_guess_is_told_from_an_announcement() -> None:
    assert "1,936 tokens of that the replica had not yet announced" in text(exact_tokens=16)


def test_a_broken_expectation_is_said() -> None:
    outcome = OutcomeView("A", 1952, 1952, 0, {"stale_index": 1952, "partial_block": 28}, None)
    told = text(outcome=outcome)
    assert "found 0 tokens in its cache, 1,952 tokens fewer than expected" in told
    more = OutcomeView("B", 1952, 0, 1952, {"partial_block": 28}, None)
    assert "B took it instead. The engine found 1,952 tokens in its cache, 1,952 tokens more" in text(
        outcome=more
    )


def test_a_diverging_prompt_names_the_tokens_to_look_at() -> None:
    outcome = OutcomeView("A", 0, 0, 0, {"diverged": 1936, "cold": 32, "partial_block": 12}, 2)
    assert "At tokens 32 to 47 (block 2) it parts" in text(outcome=outcome)


def test_what_has_not_happened_is_not_told() -> None:
    assert "It has no token yet." in text(outcome=None, first_token_s=None, total_s=None)
    assert "It ended after 1.31 s without a token." in text(outcome=None, first_token_s=None)
    assert "It is still running." in text(total_s=None)


def test_waiting_and_retries_come_first() -> None:
    assert "It waited 250 ms at the router" in text(held_s=0.25)
    assert "This is attempt 3; C and D had refused or lost it." in text(attempt=3, excluded=["C", "D"])
    assert "This is attempt 2; what was answered before was lost on its way." in text(attempt=2)


def test_an_answer_that_went_on_elsewhere_is_told_as_the_attempt_that_began_it() -> None:
    told = text(num_attempts=2, rest_to="B")
    assert "This is attempt" not in told
    assert "430 ms. The answer was cut off after that; attempt 2 sent the rest to B. 8 tokens out" in told


def test_the_shadow_speaks_last() -> None:
    shadow = ShadowView("round_robin", "B", 0, False, 0.76)
    assert explain(msgspec.structs.replace(REQUEST, shadow=shadow))[-1] == (
        "The shadow policy round_robin would have sent it to B, which held 0 tokens: 760 ms dearer by the "
        "live cost model."
    )
    same = ShadowView("round_robin", "A", 1952, True, 0.0)
    assert text(shadow=same).endswith("would have done the same.")
    assert text(shadow=ShadowView("x", "B", 0, False, None)).endswith("to B, which held 0 tokens.")
    assert text(shadow=ShadowView("x", "B", 0, False, 0.0)).endswith("at the same cost.")
    assert "cheaper" in text(shadow=ShadowView("x", "B", 0, False, -0.2))


def test_other_policies_costs_are_not_passed_off_as_theirs() -> None:
    told = text(policy="power_of_two")
    assert "By the default cost model it would cost 420 ms" in told
    assert "next best" not in told


def test_unknown_speeds_are_said() -> None:
    told = text(candidates=[candidate("A", 1952, None), candidate("B", 0, None)])
    assert "Its speed was not known yet" in told


def test_near_ties_are_explained() -> None:
    twin = candidate("B", 1952, cost(0.40, 0.01, 0.01))
    assert "B would have cost the same" in text(candidates=[HOLDER, twin])
    cheaper = candidate("B", 1952, cost(0.39, 0.01, 0.01))
    assert "10 ms less: among near-ties the draw is random." in text(candidates=[HOLDER, cheaper])


def test_numbers_read_well() -> None:
    assert [tokens(1), tokens(0), tokens(1980)] == ["1 token", "0 tokens", "1,980 tokens"]
    assert [seconds(0.0), seconds(0.0004), seconds(0.0242)] == ["0 ms", "0.4 ms", "24 ms"]
    assert seconds(1.314) == "1.31 s"
