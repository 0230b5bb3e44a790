"""Detokenizing by hand: the cases a reader wants to see. The laws are in tests/property/."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from cache.messages import FinishReason, SamplingParams
from replica.output import detokenizer
from replica.output.detokenizer import Detokenizer, NoText, TokenDecoder
from tests.fakes.engine import TokenizersDecoder

DECODER = TokenizersDecoder()


def pieces(
    tokens: list[int],
    decoder: TokenDecoder = DECODER,
    sent_chars: int = 0,
    eos: int = 2,
    prompt: Sequence[int] = (),
    **sampling: object,
) -> tuple[list[str], FinishReason | None]:
    """What each token lets out, and how it ended."""
    params = SamplingParams(**{"max_tokens": 1000, **sampling})  # type: ignore[arg-type]
    detokenizer = Detokenizer(
        decoder,
        params,
        frozenset({eos}),
        max_tokens=params.max_tokens,
        sent_chars=sent_chars,
        prompt=prompt,
    )
    out = []
    for token_id in tokens:
        reason = detokenizer.push(token_id)
        out.append(detokenizer.take())
        if reason is not None:
            break
    return out, detokenizer.finish_reason


class Letters:
    """Token 0 is "a", 1 is "b" and so on: for tests about borders, not about bytes."""

    def decode(self, token_ids: object) -> str:
        return "".join(chr(ord("a") + t) for t in token_ids)  # type: ignore[attr-defined]


def letters(text: str) -> list[int]:
    return [ord(c) - ord("a") for c in text]


def test_half_a_character_waits_for_the_other_half() -> None:
    tokens = DECODER.encode("🙂")
    assert len(tokens) > 1
    assert pieces(tokens)[0] == [""] * (len(tokens) - 1) + ["🙂"]


def test_broken_bytes_come_out_at_the_end() -> None:
    """No more tokens can complete them: shown as any decoder shows them."""
    tokens = DECODER.encode("🙂")[:1]
    assert pieces(tokens, max_tokens=1) == (["\ufffd"], FinishReason.LENGTH)


def test_stop_string_across_tokens_is_held_back_and_left_out() -> None:
    assert pieces(letters("xxstopyy"), Letters(), eos=99, stop=("stop",)) == (
        ["x", "x", "", "", "", ""],
        FinishReason.STOP,
    )


def test_what_only_began_like_a_stop_is_given_out() -> None:
    out, _ = pieces(letters("stostop"), Letters(), eos=99, stop=("stop",))
    assert out == ["", "", "", "sto", "", "", ""]


def test_held_back_text_comes_out_when_the_tokens_end() -> None:
    assert pieces(letters("xst"), Letters(), eos=99, stop=("stop",), max_tokens=3) == (
        ["x", "", "st"],
        FinishReason.LENGTH,
    )


def test_end_of_sequence_adds_no_text_and_lets_held_text_out() -> None:
    tokens = letters("ast")
    assert pieces([*tokens, 25], Letters(), eos=25, stop=("stop",)) == (
        ["a", "", "", "st"],
        FinishReason.STOP,
    )


def test_stop_ids_count_even_when_eos_is_ignored() -> None:
    tokens = letters("abcd")
    assert pieces(tokens, Letters(), eos=1, ignore_eos=True, stop_token_ids=(2,)) == (
        ["a", "b", ""],
        FinishReason.STOP,
    )


def test_min_tokens_covers_eos_ids_and_strings() -> None:
    tokens = letters("abab")
    assert pieces(tokens, Letters(), eos=1, min_tokens=3)[0] == ["a", "b", "a", ""]
    assert pieces(tokens, Letters(), eos=99, stop_token_ids=(1,), min_tokens=3)[0] == ["a", "b", "a", ""]
    assert "".join(pieces(tokens, Letters(), eos=99, stop=("ab",), min_tokens=3)[0]) == "ab"


def test_a_stop_complete_before_min_tokens_never_counts() -> None:
    """It was held back as the beginning of another one, and found by the first token that may end it."""
    of = partial(pieces, decoder=Letters(), eos=99, stop=("a", "ab"), min_tokens=3)
    assert "".join(of(letters("xacd"))[0]) == "xacd"
    assert "".join(of(letters("xaca"))[0]) == "xac"
    assert "".join(of(letters("xab"))[0]) == "x"


@pytest.mark.parametrize("sampling", [{"stop": ("d",)}, {"stop": ("z",), "stop_token_ids": (3,)}])
def test_the_first_token_that_may_end_it_does_so_also_as_the_last_of_a_chunk(
    sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detokenizer, "CHUNK_TOKENS", 4)
    params = SamplingParams(max_tokens=9, min_tokens=4, **sampling)
    pushed = Detokenizer(Letters(), params, frozenset(), max_tokens=9)
    assert pushed.push_all(letters("abcdef")) is FinishReason.STOP
    assert pushed.take() == "abc"


def test_a_stop_begun_before_min_tokens_and_completed_after_counts() -> None:
    assert "".join(pieces(letters("xab"), Letters(), eos=99, stop=("ab",), min_tokens=3)[0]) == "x"


@pytest.mark.parametrize("sent", range(9))
def test_continuation_gives_out_from_sent_chars_on(sent: int) -> None:
    out, reason = pieces(letters("xxyyzzxstop"), Letters(), eos=99, stop=("stop",), sent_chars=sent)
    assert ("".join(out), reason) == ("xxyyzzx"[sent:], FinishReason.STOP)


def test_special_tokens_are_invisible() -> None:
    tokens = DECODER.encode("one") + [0] * 50 + DECODER.encode(" two")
    assert "".join(pieces(tokens, eos=2)[0]) == "one two"


class Pieces(TokenizersDecoder):
    """Sentencepiece-style, as Llama 2 and Mistral decode: the first token's space is dropped."""

    VOCAB: ClassVar = {"▁a": 0, "▁b": 1, "c": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "▁": 6, "<s>": 7}

    def __init__(self) -> None:
        self.tokenizer = Tokenizer(BPE(self.VOCAB, [], byte_fallback=True))
        self.tokenizer.add_special_tokens(["<s>"])
        self.tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )


def test_leading_spaces_survive_a_decoder_that_drops_them() -> None:
    """Context tokens keep it for all but the first token, and the prompt's end for that one."""
    out, _ = pieces([0, 1, 2, 3, 4, 5, 1, 0], Pieces(), eos=99)
    assert out == ["a", " b", "c", "", "", "€", " b", " a"]


@pytest.mark.parametrize(
    "prompt",
    [
        [7, 0],
        [0, 6],  # it ends in a space, which alone decodes to nothing
        [0, 7],  # and in what cannot be seen
        [3, 4, 5],
        [4, 5, 2],  # it begins within a character
    ],
)
def test_a_text_is_what_is_added_to_the_prompts(prompt: list[int]) -> None:
    """A completion of "Once upon" began with "a time": the first token had lost its space."""
    decoder, output = Pieces(), [1, 2, 3, 4, 5, 0]
    out, _ = pieces(output, decoder, eos=99, prompt=prompt)
    assert out == [" b", "c", "", "", "€", " a"]
    assert decoder.decode([*prompt, *output]) == decoder.decode(prompt) + "".join(out)


@pytest.mark.parametrize("prompt", [[], [7] * 20, [3], [0, 3, 4]])
def test_a_prompt_without_an_end_to_stand_behind_is_none(prompt: list[int]) -> None:
    assert pieces([1, 0], Pieces(), eos=99, prompt=prompt)[0] in (["b", " a"], [" b", " a"])


def test_half_a_character_of_the_prompts_is_not_completed() -> None:
    """Its other half is no character by itself: it comes out as any decoder shows it."""
    tokens = DECODER.encode("🙂")
    behind = "".join(pieces(tokens[1:], prompt=tokens[:1], max_tokens=len(tokens) - 1)[0])
    assert behind == "".join(pieces(tokens[1:], max_tokens=len(tokens) - 1)[0]) == DECODER.decode(tokens[1:])


def test_an_engine_without_text_still_counts_tokens() -> None:
    assert pieces([1, 1, 1, 1], NoText(), max_tokens=3) == (["", "", ""], FinishReason.LENGTH)
    assert pieces([1, 2, 1], NoText(), eos=2) == (["", ""], FinishReason.STOP)


def test_pushing_after_the_end_is_a_bug() -> None:
    detokenizer = Detokenizer(Letters(), SamplingParams(max_tokens=1), frozenset(), max_tokens=1)
    assert detokenizer.push(0) is FinishReason.LENGTH
    with pytest.raises(AssertionError):
        detokenizer.push(0)
