"""Where texts are cut, and which tokenizers are left whole."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tokenizers import AddedToken, NormalizedString, PreTokenizedString, Tokenizer, models
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedTokenizerFast

from router.prompts.chat import Chat
from router.prompts.prompt import PromptEncoder
from router.prompts.segments import Segmenter, SegmentRule, probe_texts, segment_rule
from tests.fakes.http import ByteTokenizer
from tests.fakes.tokenizers import CHATML_TOKENS, SHAPES, a_tokenizer


def raw(content: str, **flags: bool) -> AddedToken:
    return AddedToken(content, normalized=False, **flags)


def split(text: str, *added: AddedToken) -> list[str]:
    segmenter = Segmenter.of(added)
    assert segmenter is not None
    return segmenter.split(text)


# --- the cut --------------------------------------------------------------------------------------


def test_a_segment_is_a_special_token_with_the_text_behind_it() -> None:
    chat = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert split(chat, *CHATML_TOKENS) == [
        "<|im_start|>user\nHi",
        "<|im_end|>\n",
        "<|im_start|>assistant\n",
    ]


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("", []),
        ("no token", ["no token"]),
        ("before<s>", ["before", "<s>"]),
        ("<s><s>", ["<s>", "<s>"]),
        ("<s", ["<s"]),
    ],
)
def test_edges(text: str, segments: list[str]) -> None:
    assert split(text, raw("<s>")) == segments


def test_the_longest_token_wins_and_hides_those_inside_it() -> None:
    assert split("a<|b|>c", raw("<|b|>"), raw("<|"), raw("<|b|>c")) == ["a", "<|b|>c"]
    assert split("x</s><s>y", raw("</s><s>"), raw("<s>")) == ["x", "</s><s>y"]


def test_nothing_is_cut_where_a_neighbour_counts() -> None:
    """A token that takes the spaces on its left, or wants to stand alone, stays with what is before it."""
    others = (raw("<l>", lstrip=True), raw("<w>", single_word=True), raw("word"), AddedToken("<n>"))
    assert split("a <l>b <w>c word <n> <s>d", raw("<s>"), *others) == ["a <l>b <w>c word <n> ", "<s>d"]
    assert Segmenter.of(others) is None


def test_tokens_that_take_spaces_on_their_right_keep_them() -> None:
    """As Phi 3 has it: all of its chat tokens do."""
    phi = (raw("<|user|>", rstrip=True), raw("<|end|>", rstrip=True))
    assert split("<|user|> \nHi<|end|>\n<|user|>", *phi) == ["<|user|> \nHi", "<|end|>\n", "<|user|>"]


# --- which tokenizers -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*SHAPES, "tiny"])
def test_common_pipelines_keep_the_rule(shape: str) -> None:
    tokenizer = a_tokenizer(shape)
    tokenizer("")
    rule = segment_rule(tokenizer)
    assert isinstance(rule, SegmentRule)
    assert rule.segmenter.cuts >= {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert (rule.prefix, rule.suffix) == (((1,), (2,)) if shape == "wordpiece" else ((), ()))


class Bytes(ByteTokenizer):
    """Another library's tokenizer: no backend to look into. A chat is its first message."""

    def apply_chat_template(self, messages: Any, **_kwargs: Any) -> list[int]:
        return list(messages[0]["content"].encode())


def refusal(tokenizer: Any) -> str:
    encoder = PromptEncoder(tokenizer, name="m")
    assert encoder.statistics() is None
    assert encoder.whole_reason is not None
    encoder.close()
    return encoder.whole_reason


class CountsPieces:
    """Splits a piece into characters if its number in the whole text is odd: no segment can know."""

    def pre_tokenize(self, text: PreTokenizedString) -> None:
        text.split(self._split)

    def _split(self, index: int, piece: NormalizedString) -> list[NormalizedString]:
        size = len(str(piece))
        return [piece[at : at + 1] for at in range(size)] if index % 4 == 2 else [piece]


def test_a_pipeline_that_counts_pieces_is_found_out_by_trying() -> None:
    tokenizer = a_tokenizer("bytes")
    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(CountsPieces())
    assert "other tokens for segments" in refusal(tokenizer)


def test_a_class_with_code_of_its_own_is_left_whole() -> None:
    class Polite(PreTrainedTokenizerFast):
        def _encode_plus(self, text: str, **kwargs: Any) -> Any:
            return super()._encode_plus("please " + text, **kwargs)

    tokenizer = Polite(tokenizer_object=SHAPES["bytes"]())
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    assert "plain" in refusal(tokenizer)
    assert "plain" in refusal(Bytes())


def test_dropout_and_bare_vocabularies_are_left_whole() -> None:
    random = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5))
    random.add_special_tokens([raw("<s>")])
    assert "random" in refusal(PreTrainedTokenizerFast(tokenizer_object=random))
    assert "no special token" in refusal(a_tokenizer("bytes", ()))


def test_it_is_said_once_and_prompts_still_work(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="router.prompts.prompt"):
        encoder = PromptEncoder(Bytes(), name="bytes")
        for _ in range(3):
            assert list(encoder.text("ab")) == [97, 98]
            assert encoder.chat(Chat([{"role": "user", "content": "x"}]))
    assert [record.message for record in caplog.records] == ["tokenizing whole prompts"]
    encoder.close()


def test_probes_are_the_same_at_every_start_and_meet_every_common_token() -> None:
    cuts = frozenset(f"<|{name}|>" for name in range(40))
    texts = probe_texts(cuts)
    assert texts == probe_texts(cuts)
    assert all(any(cut in text for text in texts) for cut in cuts)
    assert len(probe_texts(frozenset(f"<unused{i}>" for i in range(6000)))) == len(texts)
