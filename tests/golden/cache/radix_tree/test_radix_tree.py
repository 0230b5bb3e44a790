"""The life of a radix tree: `nine_steps.json` shows the tree after each step as a reader would draw it.

A node is a run of text, a token per letter; beside it how many use it now and what hangs below it. `idle`
lists the runs that nobody uses, in the order in which they go. A step is one request that runs to its end
(its prompt is looked up and computed, then its answer), several at once, or several answers to one prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cache.block_hash import BlockHasher
from cache.kv_cache_manager import SequenceBlocks
from cache.radix_cache import RadixCache
from cache.types import pack_tokens
from tests.fakes.cache import a_fingerprint
from tests.fakes.radix import check_tree, drawn, text_of

FILE = Path(__file__).parent / "nine_steps.json"


def test_nine_steps() -> None:
    story = json.loads(FILE.read_text())
    assert len(story["steps"]) == 9
    teller = Teller(story["num_slots"])
    for step in story["steps"]:
        teller.tell(step)


class Teller:
    def __init__(self, num_slots: int) -> None:
        self.hasher = BlockHasher(a_fingerprint())
        self.cache = RadixCache(num_slots, self.hasher)

    def tell(self, step: dict[str, Any]) -> None:
        why = step["why"]
        began: list[SequenceBlocks] = []
        for request in step["requests"]:
            first = self._admit(request, why)
            samples = [first, *(self._fork(first) for _ in request["answers"][1:])]
            for sequence, answer in zip(samples, request["answers"], strict=True):
                self._write(sequence, answer)
            began += samples
        if "while_running" in step:
            assert self._tree() == step["while_running"], why
        for sequence in began:
            self.cache.release(sequence)
        assert self._tree() == step["tree"], why
        assert [text_of(node) for node in self.cache.tree.idle()] == step["idle"], why
        assert self.cache.stats().free == self.cache.stats().total
        check_tree(self.cache.tree)

    def _admit(self, request: dict[str, Any], why: str) -> SequenceBlocks:
        """Looked up and computed, in a step of its own."""
        sequence = self.cache.begin(pack_tokens(map(ord, request["prompt"])))
        hit = self.cache.match(sequence)
        assert request["prompt"][: hit.num_tokens] == request["hit"], why
        self.cache.admit(sequence, hit, len(request["prompt"]) - hit.num_tokens)
        self.cache.commit_step()
        return sequence

    def _fork(self, first: SequenceBlocks) -> SequenceBlocks:
        """Another answer to its prompt, whose last token it computes again: that gives it a first one."""
        sequence, num_tokens = self.cache.begin(first.token_ids[:]), len(first.token_ids) - 1
        self.cache.fork(first, sequence, num_tokens)
        self.cache.grow(sequence, num_tokens + 1)
        self.cache.commit_step()
        return sequence

    def _write(self, sequence: SequenceBlocks, answer: str) -> None:
        """A token a step. What is shown is what was computed: the last token sampled never is."""
        for token_id in map(ord, answer):
            sequence.token_ids.append(token_id)
            self.cache.grow(sequence, len(sequence.token_ids))
            self.cache.commit_step()

    def _tree(self) -> Any:
        roots = self.cache.tree.roots()
        assert set(roots) <= {self.hasher.root()}
        return drawn(roots[self.hasher.root()]) if roots else {}
