"""Worked examples of the cache, one file each, replayed step by step.

A file's steps show what a reader would draw on paper: every sequence's block table, the cached blocks and
the free queue, head first. Tokens are letters (their code points), numbers, `[first, end)` ranges.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache.block_hash import BlockHasher, Placeholder, hint, placeholder_keys
from cache.disciplines import CacheDiscipline, paged_cache
from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.kv_cache_manager import PrefixHit, SequenceBlocks
from cache.types import BlockHash, pack_tokens
from tests.fakes.cache import a_fingerprint

FOLDER = Path(__file__).parent
STORIES = sorted(path.stem for path in FOLDER.glob("*.json") if path.stem != "hashes")


def test_there_are_stories() -> None:
    assert {
        "ten_blocks",
        "duplicates",
        "duplicates_merged",
        "image",
        "prefixes",
        "whole_need",
        "preemption",
    } <= set(STORIES)


@pytest.mark.parametrize("algorithm", HashAlgorithm)
@pytest.mark.parametrize("name", STORIES)
def test_story(name: str, algorithm: HashAlgorithm) -> None:
    file = json.loads((FOLDER / f"{name}.json").read_text())
    discipline = CacheDiscipline(file.get("discipline", CacheDiscipline.APPEND_ONLY))
    teller = Teller(file["num_blocks"], file["block_size"], algorithm, discipline)
    for number, step in enumerate(file["steps"]):
        teller.tell(step, f"{name}, step {number}: {step.get('why', step['do'])}")


class Teller:
    """Plays one file against a manager. Each step is an engine step of its own, committed at once."""

    def __init__(
        self, num_blocks: int, block_size: int, algorithm: HashAlgorithm, discipline: CacheDiscipline
    ) -> None:
        self.block_size = block_size
        self.hasher = BlockHasher(a_fingerprint(block_size=block_size, hash_algorithm=algorithm))
        self.manager = paged_cache(discipline, num_blocks, self.hasher, block_size=block_size)
        self.sequences: dict[str, SequenceBlocks] = {}

    def tell(self, step: dict[str, Any], where: str) -> None:
        getattr(self, step["do"])(step, where)
        self.manager.commit_step()
        if step["do"] != "look":
            assert self._state() == (step["tables"], step["cached"], step["free_queue"]), where
        for prompt in step.get("still_cached", []):
            assert self._last_hash(prompt) in self.manager.pool.cached_hashes(), where
        for prompt in step.get("no_longer_cached", []):
            assert self._last_hash(prompt) not in self.manager.pool.cached_hashes(), where

    def look(self, step: dict[str, Any], where: str) -> None:
        sequence, hit = self._hit(step, where)
        whole = len(sequence.token_ids) - hit.num_tokens + step.get("to_come", 0)
        if "new_blocks" in step:
            assert self.manager.new_blocks(whole) == step["new_blocks"], where
            assert self.manager.blocks_needed(sequence, hit, whole) == step["needs"], where

    def admit(self, step: dict[str, Any], where: str) -> None:
        sequence, hit = self._hit(step, where)
        num_tokens = step.get("num_tokens", len(sequence.token_ids) - hit.num_tokens)
        if "needs" in step:
            assert self.manager.blocks_needed(sequence, hit, num_tokens) == step["needs"], where
        self.manager.admit(sequence, hit, num_tokens)

    def grow(self, step: dict[str, Any], where: str) -> None:
        sequence = self.sequences[step["sequence"]]
        sequence.token_ids.extend(tokens_of(step["append"]))
        self.manager.grow(sequence, len(sequence.token_ids))

    def release(self, step: dict[str, Any], where: str) -> None:
        self.manager.release(self.sequences[step["sequence"]])

    def _hit(self, step: dict[str, Any], where: str) -> tuple[SequenceBlocks, PrefixHit]:
        if "tokens" in step:
            self.sequences[step["sequence"]] = self.manager.begin(
                tokens_of(step["tokens"]),
                salt=step.get("salt", ""),
                adapter=step.get("adapter", ""),
                extra_keys=self._extra_keys(step, where),
            )
        sequence = self.sequences[step["sequence"]]
        hit = self.manager.match(sequence)
        assert list(hit.block_ids) == step["hit"], where
        return sequence, hit

    def _extra_keys(self, step: dict[str, Any], where: str) -> dict[int, tuple[bytes, ...]]:
        images = [
            Placeholder(first, count, name.encode())
            for name, (first, count) in step.get("images", {}).items()
        ]
        keys = placeholder_keys(images, self.block_size)
        for block, names in step.get("images_of_blocks", {}).items():
            assert [key[:-16].decode() for key in keys[int(block)]] == names, where
        if "images_of_blocks" in step:
            assert len(keys) == len(step["images_of_blocks"]), where
        return keys

    def _state(self) -> tuple[dict[str, list[int]], list[int], list[int]]:
        pool = self.manager.pool
        tables = {name: s.block_table for name, s in self.sequences.items() if s.block_table}
        cached = [block.block_id for block in pool.blocks if block.block_hash is not None]
        return tables, cached, [block.block_id for block in pool.free_queue]

    def _last_hash(self, prompt: str) -> BlockHash:
        return self.hasher.chain(self.hasher.root(), tokens_of([prompt]))[-1]


@pytest.mark.parametrize(
    "case", json.loads((FOLDER / "hashes.json").read_text()), ids=lambda case: case["name"]
)
def test_hashes(case: dict[str, Any]) -> None:
    """Another value makes every running router blind: bump HASH_FORMAT_VERSION, then update the file."""
    mark = {**case["fingerprint"], "hash_algorithm": HashAlgorithm(case["fingerprint"]["hash_algorithm"])}
    hasher = BlockHasher(Fingerprint(**mark))
    root = hasher.root(**case["request"])
    assert root.hex() == case["root"]
    extra_keys = {int(index): tuple(map(str.encode, keys)) for index, keys in case["extra_keys"].items()}
    chain = hasher.chain(root, tokens_of(case["tokens"]), extra_keys)
    assert [block_hash.hex() for block_hash in chain] == case["chain"]
    assert [str(hint(block_hash)) for block_hash in chain] == case["hints"]


def tokens_of(items: list[Any]) -> array[int]:
    return pack_tokens(token for item in items for token in _tokens_of(item))


def _tokens_of(item: Any) -> Iterator[int]:
    if isinstance(item, str):
        yield from map(ord, item)
    elif isinstance(item, list):
        yield from range(*item)
    elif isinstance(item, dict):
        yield from [item["repeat"]] * item["times"]
    else:
        yield item
