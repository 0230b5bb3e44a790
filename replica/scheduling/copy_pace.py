"""What a block costs to copy back from host memory, learned while serving, and when that beats computing it.

A block's copy takes the same wherever it stands in a prompt, while what it costs to compute grows with what
stands before it. So of blocks in a row it pays to copy all or none.
Pure arithmetic: knows no clock, no bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from cache.events import StepTimeModel
from replica.scheduling.runner import CopyTime
from replica.scheduling.step_time import attention_pairs

FORGETTING = 0.9  # per copy: about the last ten count
# Prompts refused until one is copied all the same: nothing else would show that it takes less now.
ASK_AGAIN = 64


class CopyPace:
    """Owned by the engine thread."""

    def __init__(
        self, step_time: Callable[[], StepTimeModel | None], *, block_size: int, max_batched_tokens: int
    ) -> None:
        """step_time: what computing takes, as far as that is known."""
        self._step_time = step_time
        self._block_size = block_size
        self._max_batched_tokens = max_batched_tokens
        self._loads, self._saves = _Mean(), _Mean()
        self._num_refused = 0

    def observe(self, copy: CopyTime) -> None:
        """Learn from copies made. O(1)."""
        if copy.is_load:
            self._num_refused = 0
        (self._loads if copy.is_load else self._saves).add(copy.num_blocks, copy.elapsed_s)

    def block_s(self) -> float | None:
        """Seconds to copy a block back; before the first, what copying one out takes. None before any."""
        return self._loads.value if self._loads.value is not None else self._saves.value

    def is_cheaper(self, cached_tokens: int, num_blocks: int) -> bool:
        """Whether to copy so many blocks after so many cached tokens. Yes, until both costs are known.

        Changes nothing: of one prompt it is asked when it comes, and each time that it might start.
        """
        block_s, model = self.block_s(), self._step_time()
        if block_s is None or model is None:
            return True
        num_tokens = num_blocks * self._block_size
        compute_s = (
            num_tokens / self._max_batched_tokens * (model.base_s + model.per_sequence_s)
            + num_tokens * model.per_token_s
            + attention_pairs(cached_tokens, num_tokens) * model.per_attention_s
        )
        return num_blocks * block_s < compute_s or self._num_refused >= ASK_AGAIN

    def refused(self) -> None:
        """A prompt has started without what it could have copied."""
        self._num_refused += 1


class _Mean:
    """Seconds per block, the older copies fading."""

    def __init__(self) -> None:
        self._blocks = self._seconds = 0.0

    def add(self, num_blocks: int, elapsed_s: float) -> None:
        self._blocks = FORGETTING * self._blocks + num_blocks
        self._seconds = FORGETTING * self._seconds + elapsed_s

    @property
    def value(self) -> float | None:
        return self._seconds / self._blocks if self._blocks else None
