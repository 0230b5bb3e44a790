"""Draws: pure in (seed, position), distributed as the softmax, from exactly the allowed tokens."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.messages import SamplingParams
from replica.errors import InvalidLogits
from replica.output import filters, sampler
from replica.output.filters import NUCLEUS_CANDIDATES, Filters
from replica.output.noise import draw_keys, gumbel_noise, seed_keys
from replica.output.sampler import DrawRow, Sampler

CPU = torch.device("cpu")
NO_EOS: frozenset[int] = frozenset()


def sample(logits: torch.Tensor, rows: Sequence[DrawRow | None], eos: frozenset[int]) -> list[int | None]:
    """One step of a sampler that has seen nothing before."""
    return Sampler(eos).sample(logits, rows).tokens


def row(seed: int = 0, position: int = 5, num_output_tokens: int = 0, **sampling: Any) -> DrawRow:
    return DrawRow(SamplingParams(**{"max_tokens": 9, **sampling}), seed, position, num_output_tokens)


def random_logits(rows: int, vocabulary: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


# -- the draw is a pure function of (seed, position) ----------------------------------------------------


def mixed_rows(count: int) -> list[DrawRow]:
    """Greedy, plain, top-k, top-p and both, each with a seed and position of its own."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.5},
    ]
    return [row(seed=index * 17, position=index * 3, **kinds[index % len(kinds)]) for index in range(count)]


def test_a_row_draws_the_same_alone_in_any_batch_and_in_any_order() -> None:
    logits, rows = random_logits(40, 300), mixed_rows(40)
    alone = [sample(logits[i : i + 1], [rows[i]], NO_EOS)[0] for i in range(40)]
    assert sample(logits, rows, NO_EOS) == alone
    order = list(range(40))
    random.Random(1).shuffle(order)
    for part in (order, order[:7], order[30:]):
        shuffled = sample(logits[torch.tensor(part)], [rows[i] for i in part], NO_EOS)
        assert shuffled == [alone[i] for i in part]
    assert len(set(alone)) > 20


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are drawn in slices to bound memory; where they are cut must not show."""
    logits, rows = random_logits(23, 300), mixed_rows(23)
    whole = sample(logits, rows, NO_EOS)
    for elements in (1, 300, 2100):
        monkeypatch.setattr(sampler, "MAX_SLICE_ELEMENTS", elements)
        assert sample(logits, rows, NO_EOS) == whole


def test_no_generator_is_consulted_and_none_is_advanced() -> None:
    logits, rows = random_logits(5, 300), mixed_rows(5)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = sample(logits, rows, NO_EOS)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert sample(logits, rows, NO_EOS) == first


def test_another_seed_or_position_is_another_draw() -> None:
    flat = torch.zeros(1, 1000)
    by_seed = [sample(flat, [row(seed=seed)], NO_EOS)[0] for seed in range(60)]
    by_position = [sample(flat, [row(position=position)], NO_EOS)[0] for position in range(60)]
    swapped = [sample(flat, [row(seed=5, position=seed)], NO_EOS)[0] for seed in range(60)]
    assert len(set(by_seed)) > 50
    assert len(set(by_position)) > 50
    assert sum(a == b for a, b in zip(by_seed, swapped, strict=True)) < 5  # (seed, position) is ordered


def test_draws_recorded_in_this_version_stay_what_they_are() -> None:
    """Golden: other values would change every sampled answer that clients have seen under a seed."""
    logits = torch.arange(50).float()[None] / 25
    drawn = [sample(logits, [row(seed=seed, position=9)], NO_EOS)[0] for seed in range(8)]
    assert drawn == [0, 49, 1, 43, 35, 29, 9, 17]


def test_seeds_of_any_size_and_sign_are_taken_modulo_64_bits() -> None:
    logits = random_logits(1, 300)
    for seed in (-1, -(1 << 80), 1 << 64, (1 << 64) + 7, 1 << 200):
        reduced = seed % (1 << 64)
        same = [sample(logits, [row(seed=value)], NO_EOS) for value in (seed, reduced)]
        assert same[0] == same[1]
    assert sample(torch.zeros(1, 1000), [row(seed=-1)], NO_EOS) != sample(
        torch.zeros(1, 1000), [row(seed=1)], NO_EOS
    )


def test_logits_are_left_as_they_were() -> None:
    logits, rows = random_logits(10, 300), mixed_rows(10)
    rows[3] = row(min_tokens=4, stop_token_ids=(7, 8))
    before = logits.clone()
    sample(logits, rows, frozenset({1}))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_float_type_is_taken(dtype: torch.dtype) -> None:
    logits = random_logits(10, 300).to(dtype)
    assert sample(logits, mixed_rows(10), NO_EOS) == sample(logits.float(), mixed_rows(10), NO_EOS)


# -- distribution ---------------------------------------------------------------------------------------


def chi_square(counts: Counter[int], probabilities: list[float], draws: int) -> float:
    return sum(
        (counts[token] - draws * share) ** 2 / (draws * share) for token, share in enumerate(probabilities)
    )


def limit(degrees: int) -> float:
    """The chi-square value exceeded once in about 10,000 times (Wilson and Hilferty's approximation)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.5])


@pytest.mark.parametrize("varied", ["seed", "position"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_are_distributed_as_the_softmax(varied: str, temperature: float) -> None:
    draws = 20_000
    rows = [row(**{varied: index}, temperature=temperature) for index in range(draws)]
    counts = Counter(sample(LOGITS.expand(draws, -1), rows, NO_EOS))
    probabilities = (LOGITS / temperature).softmax(-1).tolist()
    assert chi_square(counts, probabilities, draws) < limit(len(probabilities) - 1)


@pytest.mark.parametrize("filters", [{"top_k": 4}, {"top_p": 0.8}, {"top_k": 5, "top_p": 0.7}])
def test_filtered_draws_keep_the_proportions_of_what_is_left(filters: dict[str, Any]) -> None:
    draws = 20_000
    kept = naive_filter(LOGITS.tolist(), filters.get("top_k", 0), filters.get("top_p", 1.0))
    counts = Counter(sample(LOGITS.expand(draws, -1), [row(seed=i, **filters) for i in range(draws)], NO_EOS))
    assert set(counts) == kept
    weights = [math.exp(LOGITS[token]) for token in sorted(kept)]
    renumbered = Counter({place: counts[token] for place, token in enumerate(sorted(kept))})
    probabilities = [weight / sum(weights) for weight in weights]
    assert chi_square(renumbered, probabilities, draws) < limit(len(kept) - 1)


@pytest.mark.parametrize("step", ["seed", "position"])
def test_neighbouring_draws_are_independent(step: str) -> None:
    """Consecutive seeds and positions are what requests really use."""
    draws = 40_000
    flat = torch.zeros(4).expand(draws, -1)
    tokens = sample(flat, [row(**{step: index}) for index in range(draws)], NO_EOS)
    pairs: Counter[int] = Counter()
    for first, second in zip(tokens[::2], tokens[1::2], strict=True):
        assert first is not None
        assert second is not None
        pairs[first * 4 + second] += 1
    assert chi_square(pairs, [1 / 16] * 16, draws // 2) < limit(15)


def test_a_wide_vocabulary_is_drawn_evenly() -> None:
    """The token id goes into the hash: no stretch of ids may be favoured."""
    draws, vocabulary, stretches = 2_000, 8_000, 20
    tokens = sample(torch.zeros(vocabulary).expand(draws, -1), [row(seed=i) for i in range(draws)], NO_EOS)
    counts = Counter(token * stretches // vocabulary for token in tokens if token is not None)
    assert chi_square(counts, [1 / stretches] * stretches, draws) < limit(stretches - 1)


def test_the_only_token_that_may_be_drawn_is_drawn_whatever_its_noise() -> None:
    """The hash of this one is so near to 2**31 that float32 rounds it there: its wait would be infinite."""
    [row] = gumbel_noise(draw_keys(seed_keys([1]), np.array([898])), 32_000, CPU)
    assert row[4874] == row.min()
    assert torch.isfinite(row).all()


def test_noise_is_finite_from_below_and_pure() -> None:
    keys = draw_keys(seed_keys(range(50)), np.arange(50))
    noise = gumbel_noise(keys, 5000, CPU)
    assert not torch.isnan(noise).any()
    assert not torch.isposinf(noise).any()  # would win against any logit
    assert torch.equal(noise[7:9], gumbel_noise(keys[7:9], 5000, CPU))
    assert torch.equal(noise[:, :100], gumbel_noise(keys, 100, CPU))
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03


# -- greedy, filters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_is_the_maximum_whatever_the_seed(temperature: float) -> None:
    logits = random_logits(20, 300)
    rows = [row(seed=index, temperature=temperature, top_p=0.1) for index in range(20)]
    assert sample(logits, rows, NO_EOS) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocabulary", [64, 64 * 300, 64 * 300 + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_is_torchs_own_and_the_first_among_equals(vocabulary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocabulary)
    logits = torch.randn(6, vocabulary).to(dtype)
    logits[0, [5, 40, vocabulary - 1]] = 50.0  # equals in one chunk and across chunks
    logits[1] = 0.0
    logits[2] = -torch.inf
    logits[3, [1, vocabulary - 2]] = torch.nan
    logits[4, vocabulary - 1] = torch.inf
    best, tokens = sampler._largest(logits)
    expected = logits.max(dim=-1)
    torch.testing.assert_close(best, expected.values, rtol=0, atol=0, equal_nan=True)
    assert tokens.tolist() == expected.indices.tolist()
    assert tokens.tolist()[:4] == [5, 0, 0, 1]


def test_only_the_largest_logit_matters_to_a_greedy_row_that_may_stop() -> None:
    eos = frozenset({3})
    assert sampler.takes_largest(row(temperature=0.0), NO_EOS)
    assert sampler.takes_largest(row(temperature=1e-6, top_k=3, top_p=0.5), eos)
    assert not sampler.takes_largest(row(temperature=0.1), NO_EOS)
    assert sampler.takes_largest(row(temperature=0.0, min_tokens=2, num_output_tokens=2), eos)
    assert not sampler.takes_largest(row(temperature=0.0, min_tokens=2, num_output_tokens=1), eos)
    assert sampler.takes_largest(row(temperature=0.0, min_tokens=2), NO_EOS)  # nothing to hold back
    assert sampler.takes_largest(row(temperature=0.0, min_tokens=2, ignore_eos=True), eos)
    assert not sampler.takes_largest(row(temperature=0.0, min_tokens=2, stop_token_ids=(5,)), NO_EOS)


def test_a_low_temperature_approaches_greedy() -> None:
    logits = random_logits(50, 300)
    rows = [row(seed=index, temperature=1e-3) for index in range(50)]
    assert sample(logits, rows, NO_EOS) == logits.argmax(-1).tolist()


def naive_filter(scores: list[float], top_k: int, top_p: float) -> set[int]:
    """Tokens that may be drawn: the k largest, of those the fewest that reach p; ties at the edge stay."""
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    if 0 < top_k < len(scores):
        order = [token for token in order if scores[token] >= scores[order[top_k - 1]]]
    if top_p < 1:
        total = sum(math.exp(scores[token]) for token in order)
        mass, last = 0.0, order[-1]
        for token in order:
            mass += math.exp(scores[token]) / total
            if mass >= top_p:
                last = token
                break
        order = [token for token in order if scores[token] >= scores[last]]
    return set(order)


def kept_sets(scores: torch.Tensor, top_k: list[int], top_p: list[float]) -> list[set[int]]:
    limits = [SamplingParams(9, top_k=k, top_p=p) for k, p in zip(top_k, top_p, strict=True)]
    filtered = Filters.of(limits, scores.shape[1], CPU).apply(scores)
    return [set(each.isfinite().nonzero().flatten().tolist()) for each in filtered]


@given(
    scores=st.lists(st.integers(-40, 40), min_size=1, max_size=40),
    filters=st.lists(
        st.tuples(st.integers(0, 45), st.sampled_from([0.01, 0.203, 0.5, 0.777, 0.99, 1.0])),
        min_size=1,
        max_size=4,
    ),
)
def test_the_tokens_kept_are_the_naive_references(
    scores: list[int], filters: list[tuple[int, float]]
) -> None:
    values = [score / 8 for score in scores]  # exact in float32; repeats, so ties, are common
    batch = torch.tensor([values] * len(filters))
    kept = kept_sets(batch, [k for k, _ in filters], [p for _, p in filters])
    for (top_k, top_p), got in zip(filters, kept, strict=True):
        wanted = naive_filter(values, top_k, top_p)
        # Where the mass reaches p to the last bit, float32 and float64 may part by one score.
        if got != wanted:
            edge = {values[token] for token in got ^ wanted}
            assert len(edge) == 1
            assert _mass_at(values, top_k, edge.pop()) == pytest.approx(top_p, abs=1e-5)


def _mass_at(values: list[float], top_k: int, edge: float) -> float:
    kept = naive_filter(values, top_k, 1.0)
    total = sum(math.exp(values[token]) for token in kept)
    above = sum(math.exp(values[token]) for token in kept if values[token] > edge)
    return above / total


def test_top_p_over_more_tokens_than_are_looked_at_first() -> None:
    """Nearly flat: the nucleus is wider than NUCLEUS_CANDIDATES."""
    vocabulary = NUCLEUS_CANDIDATES * 3
    scores = torch.linspace(0.0, 0.5, vocabulary).repeat(3, 1)
    kept = kept_sets(scores, [0, 0, 0], [0.9, 0.001, 1.0])
    for top_p, got in zip((0.9, 0.001, 1.0), kept, strict=True):
        wanted = naive_filter(scores[0].tolist(), 0, top_p)
        assert abs(len(got) - len(wanted)) <= 2  # float32's cumulative sum over thousands
    assert len(kept[0]) > NUCLEUS_CANDIDATES


def test_top_p_keeps_the_same_tokens_whether_a_few_or_all_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = random_logits(6, NUCLEUS_CANDIDATES * 4, spread=3.0)
    top_p = [0.05, 0.3, 0.6, 0.9, 0.99, 1.0]
    by_few = kept_sets(scores, [0] * 6, top_p)
    monkeypatch.setattr(filters, "NUCLEUS_CANDIDATES", scores.shape[1])
    assert kept_sets(scores, [0] * 6, top_p) == by_few


def test_top_p_reads_nothing_back_from_a_card() -> None:
    """A tensor without content stands for one that a card has yet to compute: to ask it anything raises."""
    scores = torch.empty(3, NUCLEUS_CANDIDATES * 4, device="meta")
    limits = [SamplingParams(9, top_p=0.9, top_k=7, min_p=0.1)] * 3
    filtered = Filters.of(limits, scores.shape[1], scores.device).apply(scores)
    assert filtered.shape == scores.shape
    with pytest.raises(RuntimeError):
        bool(filtered.any())


def test_rows_do_not_share_their_filters() -> None:
    scores = random_logits(1, 50).repeat(4, 1)
    kept = kept_sets(scores, [0, 3, 50, 1], [1.0, 1.0, 0.4, 1.0])
    assert [len(each) for each in kept[:2]] == [50, 3]
    assert kept[2] == naive_filter(scores[0].tolist(), 0, 0.4)
    assert kept[3] == {int(scores[0].argmax())}


# -- stops, NaN -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_would_stop_is_not_drawn_before_min_tokens(temperature: float) -> None:
    logits = torch.zeros(1, 6)
    logits[0, [1, 2]] = 50.0  # end of sequence, and a stop id
    options: dict[str, Any] = {"temperature": temperature, "min_tokens": 3, "stop_token_ids": (2, 999, -1)}
    early = [sample(logits, [row(seed=s, num_output_tokens=2, **options)], frozenset({1})) for s in range(20)]
    late = [sample(logits, [row(seed=s, num_output_tokens=3, **options)], frozenset({1})) for s in range(20)]
    assert {token for drawn in early for token in drawn}.isdisjoint({1, 2})
    assert {token for drawn in late for token in drawn} <= {1, 2}


def test_ignore_eos_lets_end_of_sequence_be_drawn_at_any_time_but_no_stop_id() -> None:
    logits = torch.tensor([[0.0, 9.0, 10.0, 0.0]])
    options: dict[str, Any] = {
        "temperature": 0.0,
        "min_tokens": 3,
        "stop_token_ids": (2,),
        "ignore_eos": True,
    }
    assert sample(logits, [row(**options)], frozenset({1})) == [1]


def test_min_tokens_of_one_row_leave_its_neighbours_alone() -> None:
    logits = torch.tensor([[0.0, 9.0]]).repeat(3, 1)
    rows = [row(temperature=0.0), row(temperature=0.0, min_tokens=1), row(temperature=0.0)]
    assert sample(logits, rows, frozenset({1})) == [1, 0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_anywhere_in_a_row_is_an_error(temperature: float) -> None:
    logits = random_logits(3, 40)
    logits[1, 17] = float("nan")
    with pytest.raises(InvalidLogits) as raised:
        sample(logits, [row(temperature=temperature)] * 3, NO_EOS)
    assert raised.value.places == (1,)


def test_a_row_that_draws_nothing_is_checked_all_the_same() -> None:
    logits = random_logits(3, 40)
    assert sample(logits, [row(temperature=0.0), None, row(seed=2)], NO_EOS)[1] is None
    logits[1, 3] = float("nan")
    with pytest.raises(InvalidLogits):
        sample(logits, [row(temperature=0.0), None, row(seed=2)], NO_EOS)


def test_minus_infinity_is_no_error_and_never_drawn() -> None:
    """Some families mask their padding rows of the vocabulary that way."""
    logits = torch.full((200, 6), float("-inf"))
    logits[:, 2] = 0.0
    logits[:, 4] = 1.0
    drawn = sample(logits, [row(seed=i, top_p=0.99) for i in range(200)], NO_EOS)
    assert set(drawn) == {2, 4}


def test_nothing_to_draw_from_nobody() -> None:
    assert sample(torch.empty(0, 5), [], NO_EOS) == []
