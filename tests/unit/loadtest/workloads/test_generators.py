"""Every generator passes these; then what each is for."""

from __future__ import annotations

from collections import Counter

import pytest

from loadtest.workloads.errors import UnknownName, WorkloadError
from loadtest.workloads.generator import BLOCK_TOKENS
from loadtest.workloads.generator_source import GeneratorSource
from loadtest.workloads.generators import GENERATORS, make_generator
from loadtest.workloads.request import Workload


def window(name: str, rate_per_s: float = 20.0, seed: int = 1, **parameters: float) -> Workload:
    return GeneratorSource(make_generator(name, parameters)).window(rate_per_s, 800, seed)


def hit_ratio(workload: Workload) -> float:
    """Tokens seen before in one cache without bound."""
    seen: set[int] = set()
    hits = 0
    for request in workload.requests:
        for block in request.block_ids:
            if block not in seen:
                break
            hits += BLOCK_TOKENS
        seen.update(request.block_ids)
    return hits / sum(request.input_tokens for request in workload.requests)


@pytest.mark.parametrize("name", GENERATORS)
class TestEveryGenerator:
    def test_is_a_function_of_its_seed(self, name: str) -> None:
        assert window(name) == window(name)
        assert window(name) != window(name, seed=2)

    def test_comes_at_about_the_rate_asked_for(self, name: str) -> None:
        assert window(name, rate_per_s=20.0).rate_per_s == pytest.approx(20.0, rel=0.35)

    def test_a_partial_block_is_never_shared(self, name: str) -> None:
        workload = window(name)
        partial = [r.block_ids[-1] for r in workload.requests if r.input_tokens % BLOCK_TOKENS]
        uses = Counter(block for request in workload.requests for block in request.block_ids)
        assert partial
        assert all(uses[block] == 1 for block in partial)

    def test_unknown_parameters_are_told_the_known(self, name: str) -> None:
        with pytest.raises(UnknownName) as caught:
            make_generator(name, {"nonsense": 1.0})
        assert caught.value.known
        assert all(known in str(caught.value) for known in caught.value.known)

    def test_no_parameter_may_be_negative(self, name: str) -> None:
        for parameter in GENERATORS[name].__dataclass_fields__:  # type: ignore[attr-defined]
            with pytest.raises(WorkloadError, match=parameter):
                make_generator(name, {parameter: -1.0})


def test_an_unknown_generator_is_told_the_known() -> None:
    with pytest.raises(UnknownName, match=r"agent_loops.*no_reuse"):
        make_generator("nonsense", {})


def test_a_turn_repeats_all_before_it() -> None:
    chats: dict[int, tuple[int, ...]] = {}
    num_followed = 0
    for request in window("multi_turn").requests:
        full = request.block_ids[: request.input_tokens // BLOCK_TOKENS]
        before = chats.get(request.session, ())
        assert full[: len(before)] == before
        num_followed += bool(before)
        chats[request.session] = full
    assert num_followed > 200


def test_what_they_share_is_what_they_are_for() -> None:
    assert hit_ratio(window("no_reuse")) == 0.0
    assert hit_ratio(window("hot_prefix")) > 0.7
    assert hit_ratio(window("system_prompts")) > 0.6
    assert hit_ratio(window("agent_loops")) > hit_ratio(window("multi_turn")) > 0.4


def test_popularity_of_system_prompts_follows_the_exponent() -> None:
    def top_share(exponent: float) -> float:
        uses = Counter(
            request.block_ids[0] for request in window("system_prompts", exponent=exponent).requests
        )
        return uses.most_common(1)[0][1] / 800

    assert top_share(0.0) < 0.1 < 0.25 < top_share(1.5)


def test_decode_heavy_answers_are_longer_than_their_prompts() -> None:
    requests = window("decode_heavy", turns=1).requests
    assert sum(r.output_tokens for r in requests) > 1.5 * sum(r.input_tokens for r in requests)


def test_a_session_is_the_same_at_every_rate() -> None:
    slow, fast = (
        {r.session: r.output_tokens for r in reversed(window("agent_loops", rate).requests)}
        for rate in (2.0, 4.0)
    )
    # Sessions that began inside both windows were drawn alike; those cut by the window's start need not be.
    both = [s for s in slow if s in fast and s > min(fast) + 40]
    assert len(both) > 20
    assert sum(slow[s] == fast[s] for s in both) > 0.9 * len(both)
