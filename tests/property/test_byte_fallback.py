"""Text of tokenizers that fall back to bytes, as Llama 2's: token by token it is the text of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from cache.byte_fallback import byte_tokens
from cache.messages import FinishReason, SamplingParams
from cache.tokenizer_decoder import TokenizerDecoder
from replica.output.detokenizer import Detokenizer
from tests.fakes.decoders import BYTES, LlamaDecoder
from tests.fakes.engine import TokenizersDecoder

DECODER = LlamaDecoder()
TOKENIZER = DECODER.tokenizer
SPECIAL = TOKENIZER.token_to_id("</s>")
TEXTS = st.text(st.sampled_from("ab .é日你好世界😀👩\u200d👧\ufffd"), max_size=30)
BYTE_IDS = st.integers(1, 256)
encode = DECODER.encode


def shown(
    tokens: Sequence[int], *, prompt: Sequence[int] = (), takes: Sequence[bool] = (), stop: str = ""
) -> str:
    """All text given out; taken after each token for which `takes` says so, or nothing does."""
    sampling = SamplingParams(max_tokens=1000, ignore_eos=True, stop=(stop,) if stop else ())
    max_tokens = max(1, len(tokens))  # the last one ends it
    detokenizer = Detokenizer(DECODER, sampling, frozenset(), max_tokens=max_tokens, prompt=prompt)
    text = ""
    for index, token_id in enumerate(tokens):
        reason = detokenizer.push(token_id)
        if index >= len(takes) or takes[index]:
            text += detokenizer.take()
        if reason is FinishReason.STOP:
            break
    return text + detokenizer.take()


@given(TEXTS, TEXTS, st.lists(st.booleans(), max_size=60))
@example("a", "你好世界! a😀😀b", [])
@example("你", "😀 好a😀", [])
def test_a_text_is_shown_as_it_was_written(prompt: str, text: str, takes: list[bool]) -> None:
    """Behind a prompt in bytes, too. The library took a character back with the next one's bytes."""
    assume(prompt.strip(" ") and not prompt.endswith("\ufffd"))
    assert shown(encode(text), prompt=encode(prompt), takes=takes) == text


@given(TEXTS, st.sampled_from("你好世界😀"))
@example("你好世界! a", "世")
def test_a_stop_string_is_found_among_bytes(text: str, stop: str) -> None:
    assert shown(encode(f"a{text}{stop}b"), stop=stop) == f"a{text}".split(stop)[0]


@given(st.lists(st.one_of(BYTE_IDS, st.integers(257, 264), st.just(SPECIAL)), max_size=40))
def test_whatever_bytes_come_no_text_is_taken_back(tokens: list[int]) -> None:
    """And what lacks on the way is one character that is not whole."""
    begin = encode("a")
    whole = DECODER.decode([*begin, *tokens])
    for count in range(len(tokens) + 1):
        so_far = shown([*begin, *tokens[:count]], takes=[False] * 60)
        assert so_far == DECODER.decode([*begin, *tokens[:count]])
        assert whole.startswith(so_far.removesuffix("\ufffd"))


@given(st.lists(st.one_of(TEXTS.map(encode), st.just([SPECIAL]), st.just(encode("<call>"))), max_size=5))
def test_of_valid_bytes_it_says_what_the_library_says(parts: list[list[int]]) -> None:
    tokens = [token_id for part in parts for token_id in part]
    assert DECODER.decode(tokens) == TOKENIZER.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a", "<0xE4>", "<0xBD>"], "a\ufffd"),
        (["<0xE4>", "<0xBD>", "<0xA0>", "<0xE5>"], "你\ufffd"),
        (["<0x80>", "<0x80>", "b"], "\ufffd\ufffdb"),
        (["<0xE4>", "</s>", "<0xBD>", "<0xA0>"], "你"),  # who sees no special token sees the bytes together
        (["<0xE4>", "<call>", "<0xBD>"], "\ufffd<call>\ufffd"),
    ],
)
def test_of_an_invalid_run_what_is_valid_stays(names: list[str], text: str) -> None:
    assert DECODER.decode([TOKENIZER.token_to_id(name) for name in names]) == text


def test_only_tokens_that_stand_for_bytes_are_taken_for_such() -> None:
    assert byte_tokens(TOKENIZER) == frozenset(range(1, 257))
    assert byte_tokens(TokenizersDecoder().tokenizer) == frozenset()
    spelled = Tokenizer(models.WordLevel({name: index for index, name in enumerate(BYTES)}, BYTES[0]))
    assert byte_tokens(spelled) == frozenset()


@pytest.mark.parametrize(("spells_special", "text"), [(False, "你\ufffda"), (True, "你<s>\ufffd</s>a")])
def test_the_engine_decodes_so_and_spelled_special_tokens_part_bytes(spells_special: bool, text: str) -> None:
    decoder = TokenizerDecoder(SimpleNamespace(backend_tokenizer=TOKENIZER), spells_special=spells_special)
    names = ["<0xE4>", "<0xBD>", "<0xA0>", "<s>", "<0xE4>", "</s>", "a"]
    assert decoder.decode([TOKENIZER.token_to_id(name) for name in names]) == text
