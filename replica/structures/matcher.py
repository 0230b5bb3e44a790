"""One answer's place in its structure: which tokens may come next, and what has come.

Knows tokens and masks; knows neither logits nor where the structure came from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from replica.structures.vocabulary import StructureVocabulary

# One bit per token, the lowest bit of a word first: 1 = may come next.
Words = npt.NDArray[np.int32]


class StructureMatcher:
    """Owner: the thread that runs the engine. A failed one lets everything pass, and says so in `failure`:
    what a mask costs must never fail the step it is part of."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: StructureVocabulary,
        min_tokens: int = 0,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """matcher: its own, at its beginning. min_tokens: the text ends no sooner, where it can go on."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._clock = clock
        self.num_words = vocabulary.num_words  # of a mask
        self.mask_s = 0.0  # seconds that the latest mask took

    @property
    def failure(self) -> str | None:
        """Why it cannot be followed any further; None while it can. Quotes neither text nor structure."""
        if not self._matcher.is_error():
            return None
        return _REASONS.get(self._matcher.stop_reason(), "its text left the structure, or no text has it")

    @property
    def is_over(self) -> bool:
        """Whether nothing may follow: the text is complete."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def fill(self, words: Words) -> None:
        """Write which tokens may come next, (num_words,), contiguous. Mostly about 10 us."""
        began_s = self._clock()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self.mask_s = self._clock() - began_s
        if self._matcher.is_error():
            words.fill(-1)
        elif self._num_tokens < self._min_tokens:
            without_ends = words & self._vocabulary.without_ends
            if without_ends.any():
                words[:] = without_ends

    def advance(self, token_id: int) -> None:
        """This one came. If it was not allowed, that is a failure."""
        self._num_tokens += 1
        self._matcher.consume_token(token_id)

    def begun(self, min_tokens: int) -> StructureMatcher:
        """Another one, at the same structure's beginning."""
        copied = self._matcher.deep_copy()
        copied.reset()
        return StructureMatcher(copied, self._vocabulary, min_tokens, clock=self._clock)


_REASONS = {
    "ParserTooComplex": "its grammar is too complex",
    "LexerTooComplex": "its patterns are too complex",
}
