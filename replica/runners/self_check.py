"""What a model's own forward says, before anything of it is replaced, and whether ours says the same.

Knows models, and a runner by what it answers; knows neither pages nor memory.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from typing import Any

import torch

from cache.messages import SamplingParams
from cache.types import RequestId
from replica.models import model_probe
from replica.scheduling.runner import RunnerInfo, ScheduledSequence

# The self-check's prompt: long enough for several blocks of 16 and a chunk with context.
CHECK_TOKENS = 40
# Largest relative difference between the model's own logits and ours. A wrong mask or position changes
# them by half or more; rounding stays far below even in half precision.
CHECK_TOLERANCE = {torch.float32: 1e-3}
CHECK_TOLERANCE_HALF = 0.2

# What is put in a decoder layer's place is compared with it at so many positions.
CHECK_POSITIONS = 10


class Differs(Exception):
    """A model that answers otherwise through our attention than through its own."""

    def __init__(self, difference: float, position: int, tolerance: float) -> None:
        super().__init__(
            f"paged attention changes its logits by {difference:.2g} (relative) "
            f"at position {position}; more than {tolerance} is not rounding"
        )


def reference_of(model: Any, max_model_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model itself says about the self-check's prompt, (tokens, vocabulary) float32, and the rows
    that its output layer says it of, (tokens, width); none of a model that does not name that layer."""
    length = min(CHECK_TOKENS, max_model_len)
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.tensor([check_tokens(length, vocabulary)])
    rows = [torch.empty(1, 0, 0)]
    head = model.get_output_embeddings()
    hooks = [] if head is None else [head.register_forward_pre_hook(lambda _, given: rows.append(given[0]))]
    try:
        # Eager is the definition: other implementations leave out what they cannot do (transformers 5.17's
        # SDPA ignores gemma2's softcap).
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            return model_probe.run(model, tokens, torch.arange(length)[None])[0].float(), rows[-1].flatten(
                0, -2
            )
    except Exception as error:
        raise model_probe.Unsupported(f"its own forward fails: {type(error).__name__}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()


def compare(
    reference: torch.Tensor,
    info: RunnerInfo,
    dtype: torch.dtype,
    answer: Callable[[ScheduledSequence], torch.Tensor],
) -> None:
    """Hold a runner to what the model itself said. Raises Differs.

    reference: from `reference_of`, on any device: several ranks on cards are held to what the whole model
    said on the CPU. answer: the runner's logits of a sequence's last row, (vocabulary,).
    """
    reference = reference.cpu()
    length = min(reference.shape[0], info.num_blocks * info.block_size)
    cuts = sorted({0, length // 2, max(0, length - 1), length})  # a chunk, a chunk with context, a decode
    rows = [
        (stop - 1, answer(scratch_sequence(start, stop, info)).cpu().float())
        for start, stop in itertools.pairwise(cuts)
    ]
    tolerance = tolerance_of(dtype)
    for row, ours in rows:
        own = reference[row]
        difference = float((ours - own).norm() / own.norm().clamp(min=1e-12))
        if not difference <= tolerance:  # NaN is refused too
            raise Differs(difference, row, tolerance)


def tolerance_of(dtype: torch.dtype) -> float:
    """Largest relative difference of logits that is rounding."""
    return CHECK_TOLERANCE.get(dtype, CHECK_TOLERANCE_HALF)


def check_tokens(length: int, vocabulary: int) -> list[int]:
    """Different ids in no particular order, the same every time."""
    return [(7919 * index + 13) % vocabulary for index in range(length)]


def scratch_sequence(start: int, stop: int, info: RunnerInfo) -> ScheduledSequence:
    """Tokens [start, stop) of a made-up sequence in blocks 0, 1, 2, ..."""
    return ScheduledSequence(
        request_id=RequestId("warm-up"),
        token_ids=array("i", check_tokens(stop, info.vocab_size)),
        block_table=list(range(-(-stop // info.block_size))),
        start=start,
        num_new_tokens=stop - start,
        num_prompt_tokens=stop,
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        seed=0,
    )


def spread(max_model_len: int) -> list[int]:
    """A few positions, the first ones and the last among them."""
    spaced = (index * (max_model_len - 1) // (CHECK_POSITIONS - 2) for index in range(CHECK_POSITIONS - 1))
    return sorted({0, min(1, max_model_len - 1), *spaced})
