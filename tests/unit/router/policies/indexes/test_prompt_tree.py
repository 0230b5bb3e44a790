"""Prompts in a tree of tokens: what is new, what is known, and whose the unfinished end is. Blocks of 16."""

from __future__ import annotations

from cache.types import ReplicaId
from router.policies.indexes.prefix_window import PrefixWindow
from router.policies.indexes.prompt_tree import PromptTree
from tests.fakes.policies import of_blocks
from tests.fakes.router import BLOCK_SIZE, hint_chain

A = ReplicaId("a")
DOC = hint_chain("doc", 4)


def trees() -> tuple[PrefixWindow, PromptTree]:
    window = PrefixWindow(window_s=180.0, prefill_s=lambda new, context: 1.0)
    window.add_owner(A, 10_000)
    return window, PromptTree(window, BLOCK_SIZE)


def known(prompts: PromptTree, *args: object, extra_tokens: int = 0) -> tuple[int, int]:
    leaf = prompts.find(of_blocks(*args, extra_tokens=extra_tokens))  # type: ignore[arg-type]
    return leaf.new_tokens, leaf.known_tokens


def test_what_is_known_and_what_is_new_of_a_prompt() -> None:
    _, prompts = trees()
    assert known(prompts, DOC, extra_tokens=5) == (69, 0)
    prompts.send(of_blocks(DOC), A)
    assert known(prompts, DOC, extra_tokens=5) == (5, 64)
    assert known(prompts, [*DOC, *hint_chain("q", 2)], extra_tokens=5) == (37, 64)
    assert known(prompts, [*DOC[:2], *hint_chain("q", 1)]) == (16, 32)


def test_a_prompt_known_to_its_last_token_ends_where_its_twin_did() -> None:
    _, prompts = trees()
    prompts.send(of_blocks(DOC), A)
    assert known(prompts, DOC) == (64, 0)
    prompts.send(of_blocks(DOC[:1]), A)
    assert known(prompts, DOC) == (48, 16)


def test_an_unfinished_end_after_known_blocks_is_a_leaf_of_its_own() -> None:
    window, prompts = trees()
    first = prompts.send(of_blocks(DOC), A)
    second = prompts.send(of_blocks(DOC, extra_tokens=5), A)
    third = prompts.send(of_blocks(DOC, extra_tokens=5), A)
    assert (second.num_chars, second.chars_before, second.parent) == (5, 64, first)
    assert third is not second  # nobody knows whether those five tokens are the same
    assert window.num_chars(A) == 74
