"""Prompts cut for policies: text or blocks, chunks, and where the shared beginning ends."""

from __future__ import annotations

from router.policies.prompt_parts import SharedBeginning, prompt_chunks, prompt_text
from tests.fakes.policies import cold, of_blocks, of_text
from tests.fakes.router import hint_chain


def test_text_is_compared_by_character() -> None:
    assert prompt_text(of_text("hello"), 16) == ("hello", 1, 5)


def test_without_text_a_block_stands_for_four_characters_a_token() -> None:
    hints = hint_chain("p", 3)
    assert prompt_text(of_blocks(hints, extra_tokens=7), 16) == (tuple(hints), 64, 4 * 55)


def test_chunks_are_groups_of_blocks() -> None:
    hints = hint_chain("p", 7)
    assert prompt_chunks(hints, 16, 128) == ([hints[1], hints[3], hints[5]], 128)
    assert prompt_chunks(hints, 512, 128) == (hints, 2048)
    assert prompt_chunks((), 16, 128).prefixes == ()


def test_the_shared_beginning_is_what_most_prompts_have() -> None:
    beginning, system = SharedBeginning(), hint_chain("system", 3)
    prompts = [[*system, *hint_chain(f"p{i}", 4)] for i in range(20)]
    assert beginning.first_own_block(prompts[0]) == system[0]  # nothing is known yet
    for prompt in prompts:
        beginning.observe(prompt)
    assert [beginning.first_own_block(prompt) for prompt in prompts] == [prompt[3] for prompt in prompts]
    assert beginning.first_own_block(hint_chain("else", 4)) == hint_chain("else", 4)[0]
    assert beginning.first_own_block(system) == system[2]
    assert beginning.first_own_block(()) is None


def test_a_popular_document_is_no_system_prompt() -> None:
    """A third of all prompts begin with it: less than those that do not."""
    beginning, document = SharedBeginning(), hint_chain("doc", 3)
    for index in range(60):
        beginning.observe(document if index % 3 == 0 else hint_chain(f"p{index}", 3))
    assert beginning.first_own_block([*document, *hint_chain("q", 2)]) == document[0]


def test_a_system_prompt_that_changed_is_learnt_anew() -> None:
    beginning, old, new = SharedBeginning(), hint_chain("old", 2), hint_chain("new", 2)
    for index in range(500):
        beginning.observe([*old, *hint_chain(f"p{index}", 2)])
    for index in range(500):
        beginning.observe([*new, *hint_chain(f"q{index}", 2)])
    own = hint_chain("own", 1)
    assert beginning.first_own_block([*new, *own]) == own[0]


def test_cold_prompts_have_an_unfinished_block() -> None:
    assert prompt_text(cold("p", 4), 16).num_chars == 4 * 65
