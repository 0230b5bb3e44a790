"""The step-time fit: right on data from its own formula, silent until it knows enough."""

from __future__ import annotations

import random

import pytest

from cache.events import StepTimeModel
from replica.scheduling.step_time import MIN_STEPS, STRAYS, StepTimeFit

TRUE = StepTimeModel(base_s=0.004, per_token_s=3e-5, per_attention_s=2e-9, per_sequence_s=2e-4)


def feed(
    fit: StepTimeFit, steps: int, rng: random.Random, *, model: StepTimeModel = TRUE, noise: float = 0.0
) -> None:
    """A mixture of prefill chunks at all depths and decode steps, as an engine under load sees it."""
    for _ in range(steps):
        sequences = rng.randint(1, 32)
        chunk = rng.choice([0, 0, 64, 256, 512])
        new_tokens = sequences + chunk
        attention = sequences * rng.randint(10, 4000) + chunk * (rng.randint(0, 8000) + chunk / 2)
        elapsed_s = model.step_s(new_tokens, attention, sequences) * (1 + noise * rng.uniform(-1, 1))
        fit.observe(new_tokens=new_tokens, attention=attention, sequences=sequences, elapsed_s=elapsed_s)


def test_recovers_the_model_that_made_the_data() -> None:
    fit = StepTimeFit()
    feed(fit, 300, random.Random(1))
    model = fit.model()
    assert model is not None
    for name in TRUE.__struct_fields__:
        assert getattr(model, name) == pytest.approx(getattr(TRUE, name), rel=0.01)


def test_noise_leaves_predictions_close() -> None:
    fit = StepTimeFit()
    feed(fit, 500, random.Random(2), noise=0.2)
    model = fit.model()
    assert model is not None
    for args in ((512, 512 * 256.0, 1), (16, 16 * 1000.0, 16), (520, 3_000_000.0, 8)):
        assert model.step_s(*args) == pytest.approx(TRUE.step_s(*args), rel=0.1)


def test_silent_until_enough_steps_of_different_sizes() -> None:
    fit = StepTimeFit()
    for _ in range(10 * MIN_STEPS):
        fit.observe(new_tokens=8, attention=800.0, sequences=8, elapsed_s=0.01)
    assert fit.model() is None  # decodes of one size say nothing about a prefill
    fit.observe(new_tokens=400, attention=80_000.0, sequences=1, elapsed_s=0.05)
    assert fit.model() is not None


def test_coefficients_are_never_negative() -> None:
    """Steps that get cheaper with size would make the router love long prompts."""
    fit, rng = StepTimeFit(), random.Random(3)
    for _ in range(100):
        new_tokens = rng.randint(1, 500)
        fit.observe(new_tokens=new_tokens, attention=0.0, sequences=1, elapsed_s=0.1 - new_tokens * 1e-4)
    model = fit.model()
    assert model is not None
    assert all(getattr(model, name) >= 0 for name in model.__struct_fields__)


def test_a_slower_machine_is_noticed() -> None:
    """Another process takes the cores: the fit follows within a few hundred steps."""
    fit, rng = StepTimeFit(), random.Random(4)
    feed(fit, 300, rng)
    slow = StepTimeModel(*(3 * getattr(TRUE, name) for name in TRUE.__struct_fields__))
    feed(fit, 1500, rng, model=slow)
    model = fit.model()
    assert model is not None
    assert model.prefill_s(2000, 0, 512) == pytest.approx(slow.prefill_s(2000, 0, 512), rel=0.1)


def test_long_decoding_does_not_blur_what_a_prefill_costs() -> None:
    fit, rng = StepTimeFit(), random.Random(5)
    feed(fit, 300, rng)
    for _ in range(20_000):
        attention = 8.0 * rng.randint(100, 4000)
        fit.observe(new_tokens=8, attention=attention, sequences=8, elapsed_s=TRUE.step_s(8, attention, 8))
    model = fit.model()
    assert model is not None
    assert model.prefill_s(2000, 0, 512) == pytest.approx(TRUE.prefill_s(2000, 0, 512), rel=0.05)


def test_nonsense_measurements_are_left_out() -> None:
    fit = StepTimeFit()
    feed(fit, 100, random.Random(6))
    before = fit.model()
    for _ in range(50):
        fit.observe(new_tokens=100, attention=1.0, sequences=1, elapsed_s=0.0)
        fit.observe(new_tokens=0, attention=0.0, sequences=0, elapsed_s=1.0)
    assert fit.model() == before


def scaled(factor: float) -> StepTimeModel:
    return StepTimeModel(*(factor * getattr(TRUE, name) for name in TRUE.__struct_fields__))


@pytest.mark.parametrize("factor", [10.0, 0.1, 3.0])
def test_another_pace_is_noticed_within_a_few_steps(factor: float) -> None:
    """Ten times slower, 150 steps are fifteen seconds: long after the requests sent there are late."""
    fit, rng = StepTimeFit(), random.Random(7)
    feed(fit, 300, rng, noise=0.1)
    assert fit.model() is not None
    feed(fit, STRAYS, rng, model=scaled(factor), noise=0.1)
    model = fit.model()
    assert model is not None
    for args in ((512, 512 * 256.0, 1), (16, 16 * 1000.0, 16), (520, 3_000_000.0, 8)):
        assert model.step_s(*args) == pytest.approx(factor * TRUE.step_s(*args), rel=0.25)


def test_it_is_noticed_for_the_kinds_of_step_that_did_not_occur() -> None:
    """Decodes are slow: so will be the next prefill, of which there was none since."""
    fit, rng = StepTimeFit(), random.Random(8)
    feed(fit, 300, rng)
    assert fit.model() is not None
    for _ in range(STRAYS):
        elapsed_s = 10 * TRUE.step_s(8, 8000.0, 8)
        fit.observe(new_tokens=8, attention=8000.0, sequences=8, elapsed_s=elapsed_s)
    model = fit.model()
    assert model is not None
    assert model.prefill_s(2000, 0, 512) == pytest.approx(10 * TRUE.prefill_s(2000, 0, 512), rel=0.1)


def test_decodes_that_cost_half_of_what_they_did_say_nothing_of_prompts() -> None:
    """Few answers of different lengths, each attended to by itself; then eight of one length, all at once."""
    fit, rng = StepTimeFit(), random.Random(10)
    for number in range(300):
        decodes = rng.randint(1, 3)
        elapsed_s = (0.0022 + 0.00055 * decodes) * rng.lognormvariate(0.0, 0.05)
        fit.observe(new_tokens=decodes, attention=300.0 * decodes, sequences=decodes, elapsed_s=elapsed_s)
        if number % 5 == 0:
            elapsed_s = (0.0022 + 512 * 70e-6) * rng.lognormvariate(0.0, 0.05)
            fit.observe(new_tokens=512, attention=512 * 256.0, sequences=1, elapsed_s=elapsed_s)
        fit.model()
    for _ in range(60):
        elapsed_s = 0.0031 * rng.lognormvariate(0.0, 0.05)
        fit.observe(new_tokens=8, attention=8 * 300.0, sequences=8, elapsed_s=elapsed_s)
        fit.model()
    model = fit.model()
    assert model is not None
    assert model.step_s(8, 8 * 300.0, 8) == pytest.approx(0.0031, rel=0.15)
    assert model.step_s(512, 512 * 256.0, 1) == pytest.approx(0.0022 + 512 * 70e-6, rel=0.3)


def test_the_old_pace_comes_back_as_fast() -> None:
    fit, rng = StepTimeFit(), random.Random(9)
    for factor in (1.0, 10.0, 1.0, 10.0, 1.0):
        feed(fit, 40, rng, model=scaled(factor), noise=0.05)
        fit.model()
    model = fit.model()
    assert model is not None
    assert model.prefill_s(2000, 0, 512) == pytest.approx(TRUE.prefill_s(2000, 0, 512), rel=0.1)


def test_single_slow_steps_change_the_pace_of_nothing() -> None:
    """A page fault storm, a collection of garbage: one step in five is ten times slower."""
    fit, rng = StepTimeFit(), random.Random(10)
    feed(fit, 300, rng)
    for _ in range(50):
        feed(fit, STRAYS - 1, rng)
        feed(fit, 1, rng, model=scaled(10.0))
    model = fit.model()
    assert model is not None
    assert model.prefill_s(2000, 0, 512) < 1.5 * TRUE.prefill_s(2000, 0, 512)


@pytest.mark.parametrize("seed", range(20))
def test_short_prompts_do_not_price_long_ones_by_chance(seed: int) -> None:
    """A busy machine, the first requests, none over 64 tokens: noise passed for attention, and so a prompt
    of a thousand tokens for 90 times what it takes."""
    short = StepTimeModel(base_s=0.015, per_token_s=8e-4, per_attention_s=1e-8, per_sequence_s=2e-3)
    fit, rng = StepTimeFit(), random.Random(seed)
    for number in range(MIN_STEPS + 8):
        sequences, length = (rng.randint(1, 4), rng.randint(8, 64)) if number % 6 == 0 else (4, 1)
        attention = sequences * (length * length / 2 if length > 1 else 30.0)
        elapsed_s = short.step_s(sequences * length, attention, sequences) * rng.lognormvariate(0.0, 0.5)
        fit.observe(
            new_tokens=sequences * length, attention=attention, sequences=sequences, elapsed_s=elapsed_s
        )
    model = fit.model()
    assert model is not None
    assert model.prefill_s(72, 0, 512) < 4 * short.prefill_s(72, 0, 512)
    assert model.prefill_s(1024, 0, 512) < 4 * short.prefill_s(1024, 0, 512)


def test_one_sequence_at_a_time_does_not_say_what_many_cost() -> None:
    """Half of what a step costs anyway was laid to the sequence: decoding 32 was priced at ten times."""
    fit, rng = StepTimeFit(), random.Random(11)
    for _ in range(100):
        new_tokens = rng.choice([1, 1, 1, 16, 128, 400])
        attention = new_tokens * new_tokens / 2
        elapsed_s = TRUE.step_s(new_tokens, attention, 1)
        fit.observe(new_tokens=new_tokens, attention=attention, sequences=1, elapsed_s=elapsed_s)
    model = fit.model()
    assert model is not None
    assert model.base_s == pytest.approx(TRUE.base_s + TRUE.per_sequence_s, rel=0.01)
    assert model.per_sequence_s < 0.01 * TRUE.base_s
