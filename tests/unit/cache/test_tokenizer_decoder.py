"""Token ids become text: nothing cleaned up, special tokens left out or spelled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GPTNeoXJapaneseTokenizer

from cache.tokenizer_decoder import TokenizerDecoder
from tests.fakes.tokenizers import TINY


def test_decoding_leaves_specials_out_and_cleans_nothing_up() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    decoder = TokenizerDecoder(tokenizer)
    text = "A , b . do n't  🙂\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert decoder.decode([*ids, tokenizer.eos_token_id]) == text
    spelling = TokenizerDecoder(tokenizer, spells_special=True)
    assert spelling.decode([*ids, tokenizer.eos_token_id]) == text + tokenizer.eos_token


def test_a_tokenizer_without_a_backend_decodes_itself() -> None:
    class Slow:
        def decode(
            self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
        ) -> str:
            assert not clean_up_tokenization_spaces
            return "slow" if skip_special_tokens else "<s>slow"

    assert TokenizerDecoder(Slow()).decode([1]) == "slow"
    assert TokenizerDecoder(Slow(), spells_special=True).decode([1]) == "<s>slow"


def test_ids_that_a_tokenizer_in_python_does_not_know_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("海\n船\n<|startoftext|>\n<|endoftext|>\n")
    (tmp_path / "emoji.json").write_text(json.dumps({"emoji": {}, "emoji_inv": {}}))
    tokenizer = GPTNeoXJapaneseTokenizer(str(tmp_path / "vocab.txt"), str(tmp_path / "emoji.json"))
    with pytest.raises(KeyError):
        tokenizer.decode([0, 4, 1])
    decoder = TokenizerDecoder(tokenizer)
    assert decoder.decode([0, 4, 3, 1, 1 << 30]) == "海船"
    assert decoder.decode([4]) == ""


def test_what_each_token_alone_does_not_fail_of_is_told() -> None:
    class Broken:
        def decode(self, ids: list[int], **options: bool) -> str:
            if len(ids) > 1:
                raise TypeError("broken")
            return "x"

    with pytest.raises(TypeError, match="broken"):
        TokenizerDecoder(Broken()).decode([1, 2])
