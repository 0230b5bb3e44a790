"""Token ids become text: nothing cleaned up, special tokens left out or spelled."""

from __future__ import annotations

from transformers import AutoTokenizer

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
