"""What a runner's answers are held to: the same numbers pass and others do not, wherever they come from."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from replica.runners import self_check
from replica.runners.self_check import Differs
from replica.scheduling.runner import RunnerInfo, ScheduledSequence

LENGTH, VOCABULARY = 40, 50


def info(device: str = "cpu") -> RunnerInfo:
    return RunnerInfo(
        device=device,
        attention_backend="gather_sdpa",
        kv_dtype="float32",
        num_blocks=16,
        block_size=4,
        kv_bytes_per_block=1,
        vocab_size=VOCABULARY,
        max_model_len=64,
        eos_token_ids=frozenset(),
    )


def last_row(sequence: ScheduledSequence) -> int:
    return sequence.start + sequence.num_new_tokens - 1


def test_the_same_answers_pass() -> None:
    reference = torch.randn(LENGTH, VOCABULARY)
    self_check.compare(reference, info(), torch.float32, lambda asked: reference[last_row(asked)])


@pytest.mark.parametrize("wrong_row", [LENGTH // 2 - 1, LENGTH - 2, LENGTH - 1])
@pytest.mark.parametrize("wrong", [1.0, float("nan")])
def test_a_chunk_one_with_context_and_a_decode_are_each_held_to_it(wrong_row: int, wrong: float) -> None:
    reference = torch.randn(LENGTH, VOCABULARY)

    def answer(asked: ScheduledSequence) -> torch.Tensor:
        row = last_row(asked)
        return reference[row] + (wrong if row == wrong_row else 0.0)

    with pytest.raises(Differs, match=f"position {wrong_row}"):
        self_check.compare(reference, info(), torch.float32, answer)


@pytest.mark.parametrize(("theirs", "ours"), [("cpu", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")])
def test_the_reference_may_be_on_another_device(theirs: str, ours: str) -> None:
    """As that of several ranks is, each with its part on a card. Of a fake number all can be had but its
    value: everything up to reading the difference has then gone well."""

    def answer(_: ScheduledSequence) -> torch.Tensor:
        return torch.empty(VOCABULARY, dtype=torch.bfloat16, device=ours)

    with FakeTensorMode():
        reference = torch.empty(LENGTH, VOCABULARY, device=theirs)
        with pytest.raises(DataDependentOutputException):
            self_check.compare(reference, info(ours), torch.bfloat16, answer)
