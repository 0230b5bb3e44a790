"""A row's token, bias and penalties against a reference of one row, whatever is beside it and was before."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.messages import SamplingParams
from replica.output.noise import draw_keys, gumbel_noise, seed_keys
from replica.output.penalties import SPARE_PLACES, PenalisedRow, PenaltyTable
from replica.output.sampler import Drawn, DrawRow, Sampler, takes_largest

VOCABULARY = 24
EOS = frozenset({3})
CPU = torch.device("cpu")

penalties = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.75, -1.5, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.5, -0.25, 2.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.5, 100.0]),
    }
)
biases = st.dictionaries(
    st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, -1.0, 0.5, 3.0, 100.0]), max_size=4
)
parameters = st.builds(
    lambda penalties, bias, **others: SamplingParams(
        max_tokens=64, logit_bias=tuple(sorted(bias.items())), **penalties, **others
    ),
    penalties,
    biases,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0, 1.8]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 30]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    min_tokens=st.sampled_from([0, 0, 2, 5]),
    stop_token_ids=st.sampled_from([(), (5,), (7, 900)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 0, 4]),
)


@dataclass
class Sequenced:
    """A request as a sampler sees it grow."""

    sampling: SamplingParams
    seed: int
    num_prompt_tokens: int
    token_ids: array[int]

    def row(self) -> DrawRow:
        position = len(self.token_ids)
        return DrawRow(self.sampling, self.seed, position, position - self.num_prompt_tokens, self.token_ids)

    def again(self) -> Sequenced:
        """The same request on another replica: equal tokens, none of the memory."""
        return replace(self, token_ids=array("i", self.token_ids))


sequences = st.lists(
    st.builds(
        lambda sampling, seed, prompt: Sequenced(sampling, seed, len(prompt), array("i", prompt)),
        parameters,
        st.integers(0, 1000),
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=5,
)


def model(token_ids: Sequence[int]) -> torch.Tensor:
    """Logits that depend on every token so far, (vocabulary,)."""
    seed = hash(tuple(token_ids)) & 0x7FFFFFFF
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


# -- the reference: one row, one token at a time, in plain Python but for float32 -----------------------


def reference_logits(logits: torch.Tensor, row: DrawRow) -> list[np.float32]:
    sampling, tokens = row.sampling, row.token_ids
    assert tokens is not None
    prompt, output = tokens[: row.position - row.num_output_tokens], tokens[-row.num_output_tokens :]
    counts = Counter(output if row.num_output_tokens else ())
    values = [np.float32(value) for value in logits.tolist()]
    for token, bias in sampling.logit_bias:
        values[token] += np.float32(bias)
    for token in range(VOCABULARY):
        if token in counts or token in prompt:
            penalty = np.float32(sampling.repetition_penalty)
            values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
        values[token] -= np.float32(sampling.frequency_penalty) * np.float32(counts[token])
        values[token] -= np.float32(sampling.presence_penalty) * np.float32(token in counts)
    if row.num_output_tokens < sampling.min_tokens:
        for token in {*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS)}:
            if token < VOCABULARY:
                values[token] = np.float32(-math.inf)
    return values


def reference_kept(scores: list[float], sampling: SamplingParams) -> set[int]:
    """Tokens that min-p, then top-k, then top-p leave."""
    kept = set(range(VOCABULARY))
    if sampling.min_p > 0:
        kept = {t for t in kept if scores[t] >= max(scores) + math.log(sampling.min_p) - 1e-6}
    if 0 < sampling.top_k < len(kept):
        edge = sorted((scores[t] for t in kept), reverse=True)[sampling.top_k - 1]
        kept = {t for t in kept if scores[t] >= edge}
    if sampling.top_p < 1:
        weight = {t: math.exp(scores[t] - max(scores)) for t in kept}
        total, mass = sum(weight.values()), 0.0
        for token in sorted(kept, key=lambda t: -scores[t]):
            mass += weight[token] / total
            if mass >= sampling.top_p - 1e-6:
                kept = {t for t in kept if scores[t] >= scores[token]}
                break
    return kept


def reference_tokens(logits: torch.Tensor, row: DrawRow) -> set[int]:
    """The token; several where another order of rounding may decide between them."""
    values = [float(value) for value in reference_logits(logits, row)]
    if row.sampling.temperature < 1e-5:
        return {values.index(max(values))}
    scores = [value / row.sampling.temperature for value in values]
    kept = reference_kept(scores, row.sampling)
    keys = draw_keys(seed_keys([row.seed]), np.array([row.position]))
    noise = gumbel_noise(keys, VOCABULARY, CPU)[0].tolist()
    best = max(scores[token] + noise[token] for token in kept)
    return {token for token in kept if scores[token] + noise[token] >= best - 1e-4}


# -- laws ------------------------------------------------------------------------------------------------


def step(sampler: Sampler, batch: Sequence[Sequenced]) -> Drawn:
    logits = torch.stack([model(sequence.token_ids) for sequence in batch])
    return sampler.sample(logits, [sequence.row() for sequence in batch])


@given(sequences, st.data())
def test_a_row_draws_what_the_reference_draws_step_after_step(
    batch: list[Sequenced], data: st.DataObject
) -> None:
    """In batches that members leave, come back to (preempted) and go on in elsewhere (continued)."""
    sampler = Sampler(EOS)
    for _ in range(data.draw(st.integers(1, 6))):
        present = data.draw(st.permutations(batch)) if data.draw(st.booleans()) else batch
        present = present[: data.draw(st.integers(1, len(present)))]
        drawn = step(sampler, present)
        for index, (sequence, token) in enumerate(zip(present, drawn.tokens, strict=True)):
            assert token is not None
            row, logits = sequence.row(), model(sequence.token_ids)
            assert token in reference_tokens(logits, row)
            assert step(Sampler(EOS), [sequence.again()]).tokens == [token]
            if takes_largest(row, EOS):
                assert token == int(logits.argmax())
            assert (index in drawn.logprobs) == (sequence.sampling.logprobs is not None)
        for sequence, token in zip(present, drawn.tokens, strict=True):
            assert token is not None
            sequence.token_ids.append(token)
        if data.draw(st.integers(0, 4)) == 0:
            batch = [sequence.again() for sequence in batch]


@given(sequences)
def test_log_probabilities_are_those_of_the_models_own_distribution(batch: list[Sequenced]) -> None:
    drawn = step(Sampler(EOS), batch)
    for index, found in drawn.logprobs.items():
        own = model(batch[index].token_ids).log_softmax(-1)
        token, num_top = drawn.tokens[index], batch[index].sampling.logprobs
        assert token is not None
        assert found.chosen[0] == pytest.approx(float(own[token]), abs=1e-5)
        assert found.num_top == num_top
        largest = own.topk(num_top or 0)
        assert found.top_ids.tolist() == largest.indices.tolist()
        assert found.top.tolist() == pytest.approx(largest.values.tolist(), abs=1e-5)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.lists(st.integers(0, 9), max_size=3 * SPARE_PLACES),
    penalties,
)
@settings(max_examples=50)
def test_counts_that_grow_are_the_counts_from_the_start(
    prompt: list[int], output: list[int], kind: dict[str, Any]
) -> None:
    """To the last bit, for as many steps as a table has room and more."""
    sampling = SamplingParams(max_tokens=999, **kind)
    tokens = array("i", prompt)
    grown = PenaltyTable([PenalisedRow(0, sampling, tokens, len(prompt))], 12, CPU)
    own = torch.linspace(-3, 3, 12)[None]
    for token in output:
        tokens.append(token)
        grown.follow()
        by_growth, anew = own.clone(), own.clone()
        grown.apply_(by_growth)
        PenaltyTable([PenalisedRow(0, sampling, tokens, len(prompt))], 12, CPU).apply_(anew)
        assert torch.equal(by_growth, anew)


@given(sequences, st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6, unique=True))
def test_a_masked_row_draws_from_its_mask_alone(batch: list[Sequenced], allowed: list[int]) -> None:
    mask = torch.tensor([sum(1 << token for token in allowed)], dtype=torch.int32)
    logits = torch.stack([model(sequence.token_ids) for sequence in batch])
    rows = [sequence.row() for sequence in batch]
    free = Sampler(EOS).sample(logits, rows).tokens
    drawn = Sampler(EOS).sample(logits, rows, masks={0: mask}).tokens
    may = set(allowed) - ({*rows[0].sampling.stop_token_ids, *EOS} if rows[0].sampling.min_tokens else set())
    assert not may or drawn[0] in allowed
    assert drawn[1:] == free[1:]
