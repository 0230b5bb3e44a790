"""A prompt cut the way a policy wants it: its characters, chunks of them, or how it begins.

Policies that place by text were made for text. Where only blocks are known (token ids were sent, or a
trace is replayed), a block stands for its characters: `CHARS_PER_TOKEN` per token, equal text where the
block's hash is equal. Thresholds in characters keep their meaning, and nothing as long as the text is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cache.types import HashHint
from router.policies.base import PolicyRequest
from router.policies.indexes.radix_tree import Symbols

CHARS_PER_TOKEN = 4  # what the sources take for English text

_SHARED_AFTER = 8  # prompts more with a beginning than without it, before it is taken for a system prompt
_MAX_VOTES = 256  # a system prompt that went out of use is forgotten after so many prompts
_MAX_SHARED_BLOCKS = 4096


class PromptText(NamedTuple):
    """A prompt as a sequence that can be compared from its start."""

    symbols: Symbols  # characters, or blocks where there is no text
    chars_per_symbol: int
    num_chars: int  # of the whole prompt, also of an unfinished block at its end


def prompt_text(request: PolicyRequest, block_size: int) -> PromptText:
    """The prompt's text, or its blocks in the text's place."""
    text = request.prompt.text if request.prompt is not None else ""
    if text:
        return PromptText(text, 1, len(text))
    num_chars = CHARS_PER_TOKEN * max(request.shape.num_prompt_tokens, len(request.hints) * block_size)
    return PromptText(tuple(request.hints), CHARS_PER_TOKEN * block_size, num_chars)


class PromptChunks(NamedTuple):
    """A prompt cut into equal chunks, each named together with everything before it."""

    prefixes: Sequence[int]
    chars_per_chunk: int


def prompt_chunks(hints: Sequence[HashHint], block_size: int, wanted_chars: int) -> PromptChunks:
    """The prompt's blocks, grouped so that a chunk has about `wanted_chars`, but is a block at least.

    The last, unfinished chunk is left out. Text is not needed: equal text gives equal blocks.
    """
    blocks = max(1, round(wanted_chars / (CHARS_PER_TOKEN * block_size)))
    return PromptChunks(hints[blocks - 1 :: blocks], blocks * CHARS_PER_TOKEN * block_size)


class SharedBeginning:
    """How far prompts known only as blocks begin alike: what most of them share is the system prompt.

    A majority vote per block position (Boyer and Moore 1981), so it needs no table of prompts.
    """

    def __init__(self) -> None:
        self._favourites: list[tuple[HashHint, int]] = []  # per position: block, votes

    def observe(self, hints: Sequence[HashHint]) -> None:
        favourites = self._favourites
        for index, hint in enumerate(hints[:_MAX_SHARED_BLOCKS]):
            if index == len(favourites):
                favourites.append((hint, 1))
                return
            favourite, votes = favourites[index]
            if hint == favourite:
                favourites[index] = (favourite, min(votes + 1, _MAX_VOTES))
            elif votes:
                favourites[index] = (favourite, votes - 1)
                return
            else:
                favourites[index:] = [(hint, 1)]
                return

    def first_own_block(self, hints: Sequence[HashHint]) -> HashHint | None:
        """The first block after the shared beginning, or the last there is; None without blocks."""
        if not hints:
            return None
        index = 0
        for favourite, votes in self._favourites[: len(hints) - 1]:
            if favourite != hints[index] or votes < _SHARED_AFTER:
                break
            index += 1
        return hints[index]
