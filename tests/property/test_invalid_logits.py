"""Law: whose logits are NaN fails, and nobody beside it does: the others' answers are what they are alone.

Over the simulated runner, whose pages betray any block that was handed out and never computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from replica.config import SimConfig
from replica.errors import ForwardFailed, InvalidLogits
from replica.runners.sim_runner import SimRunner
from replica.scheduling.runner import LaunchedStep, ScheduledSequence, StepResult
from tests.fakes.engine import BLOCK_SIZE, VirtualClock, known_pace, make_request, sim_config, sim_core

SIM = SimConfig(vocab_size=4)


class Poisoned(SimRunner):
    """Of these requests every row is NaN from so many tokens on. Parts of a prompt that have gone on through
    the layers have done so, whatever becomes of their step."""

    def __init__(self, healthy_by_id: Mapping[str, int], num_blocks: int, num_layers: int) -> None:
        super().__init__(
            sim_config(num_blocks, sim=SIM).sim,
            block_size=BLOCK_SIZE,
            sleep=VirtualClock().sleep,
            num_layers=num_layers,
        )
        self._healthy_by_id = healthy_by_id
        self._halfway: tuple[object, ...] = ()

    def execute(self, sequences: list[ScheduledSequence]) -> StepResult:
        return self.launch(sequences).result()

    def launch(
        self, sequences: Sequence[ScheduledSequence], before: LaunchedStep | None = None
    ) -> LaunchedStep:
        last = sequences[-1]
        if (span := last.layers) is not None:
            part = (last.request_id, last.start, last.num_new_tokens)
            assert not span.first or self._halfway == (*part, span.first)
            self._halfway = (*part, span.end)
        step = super().launch(sequences, before)
        invalid = [place for place, each in enumerate(sequences) if self._is_invalid(each)]
        if invalid and not step.failure:  # type: ignore[attr-defined]
            step.failure = InvalidLogits(invalid)  # type: ignore[attr-defined]
        return step

    def _is_invalid(self, sequence: ScheduledSequence) -> bool:
        if sequence.layers is not None and not sequence.layers.is_last:
            return False
        return sequence.start + sequence.num_new_tokens > self._healthy_by_id.get(
            sequence.request_id, math.inf
        )


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=8),
    st.dictionaries(st.integers(0, 7).map("r{}".format), st.integers(0, 35), max_size=3),
    st.sampled_from([(1, math.inf), (8, 0.001)]),
    st.booleans(),
    st.sampled_from([20, 64]),
    st.sampled_from([1, 3, 10, 40]),
)
@settings(max_examples=150)
def test_whoever_is_not_named_is_answered_as_alone(
    prompts: list[list[int]],
    healthy_by_id: dict[str, int],
    by_layers: tuple[int, float],
    ahead: bool,
    num_blocks: int,
    max_batched_tokens: int,
) -> None:
    """Few token values, so that twins share a step's blocks. Also where parts of prompts go through the
    layers one by one, and where steps are begun ahead."""
    num_layers, itl_target_s = by_layers
    options: dict[str, Any] = {"max_batched_tokens": max_batched_tokens, "itl_target_s": itl_target_s}
    with known_pace():
        core = sim_core(
            num_blocks,
            runner=Poisoned(healthy_by_id, num_blocks, num_layers),
            sim=SIM,
            max_wait_s=None,
            async_scheduling=ahead,
            **options,
        )
    requests = [
        make_request(f"r{i}", prompt, max_tokens=9, seed=i, temperature=float(i % 2))
        for i, prompt in enumerate(prompts)
    ]
    taken = [core.submit(request) for request in requests]
    failed = set()
    while core.has_work:
        for progress in core.step():
            if progress.error is not None:
                assert isinstance(progress.error, ForwardFailed)
                failed.add(progress.request.request_id)
    assert core.stats().cache.free == num_blocks
    for request, done in zip(requests, taken, strict=True):
        [alone] = sim_core(sim=SIM, prefix_caching=False).complete([request])
        # The last token of an answer is computed by nobody.
        num_computed = request.num_prompt_tokens + len(alone.token_ids) - 1
        is_poisoned = num_computed > healthy_by_id.get(request.request_id, math.inf)
        assert (request.request_id in failed) == is_poisoned
        if not is_poisoned:
            assert tuple(done.token_ids[done.num_prompt_tokens :]) == alone.token_ids
