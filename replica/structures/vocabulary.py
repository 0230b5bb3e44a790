"""The model's tokens as the bytes they stand for: what a grammar is followed over.

Knows tokenizers and llguidance's view of them; knows no grammar and no request.
"""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np

from cache.byte_level import misread_tokens

if TYPE_CHECKING:
    from llguidance import LLTokenizer

REPLACEMENT = "\ufffd"
CHECKED_TOKENS = 1024  # spread over the vocabulary: a rule for bytes that is wrong is wrong everywhere


class TokenizerUnsuited(Exception):
    """What this tokenizer's tokens stand for cannot be told for sure: nothing may be promised of its text."""


class StructureVocabulary:
    """Immutable; any thread."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """tokenizer: of transformers. vocab_size: logits in a row, more or less than there are tokens.

        Takes about a second for 150,000 tokens. Raises TokenizerUnsuited.
        """
        from llguidance import LLTokenizer  # here: an engine that follows no structures need not have it

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerUnsuited("it is not one of the tokenizers library")
        backend = copy.copy(backend)
        backend.no_padding()
        backend.no_truncation()
        # A model that names no end has its tokenizer's: drawn, it ends the structure and so the answer. Some
        # name one that is no token, such as -1.
        own = getattr(tokenizer, "eos_token_id", None)
        named, own_named = (
            [each for each in ids if 0 <= each < vocab_size and backend.id_to_token(each) is not None]
            for ids in (sorted(eos_token_ids), () if own is None else (own,))
        )
        ends = named or own_named
        try:
            known = LLTokenizer(
                _drawable(backend.to_str(), vocab_size, ends),
                n_vocab=vocab_size,
                eos_token=ends or None,
                slices=[],
            )
        except ValueError as error:
            raise TokenizerUnsuited(str(error)) from error
        misread = misread_tokens(backend)
        if written := _written_tags(backend, known, misread):
            spelling: Any = _Spelling(known, written)
            self.tokens = LLTokenizer(spelling, eos_token=known.eos_tokens)
        else:
            self.tokens = known.with_slices(LLTokenizer.general_slices())
        self.vocab_size = vocab_size
        self.num_words = -(-self.tokens.vocab_size // 32)
        # A mask of everything but what ends a text, lowest bit first.
        self.without_ends = np.full(self.num_words, -1, dtype=np.int32)
        for token_id in self.tokens.eos_tokens:
            self.without_ends.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        self._check(backend, min(vocab_size, backend.get_vocab_size()), misread)

    def _check(self, backend: Any, num_tokens: int, misread: Mapping[int, str]) -> None:
        """Compare the bytes with what the tokenizer itself makes of a token inside a text."""
        for token_id in range(0, num_tokens, max(1, num_tokens // CHECKED_TOKENS)):
            if token_id in self.tokens.eos_tokens or self.tokens.is_special_token(token_id):
                continue
            text = misread.get(token_id) or _text_of(backend, token_id)
            stands_for = self.tokens.decode_bytes([token_id]).decode("utf-8", "replace")
            if REPLACEMENT not in text and REPLACEMENT not in stands_for and text != stands_for:
                raise TokenizerUnsuited(f"token {token_id} decodes otherwise than its bytes say")


class _Spelling:
    """A vocabulary with tags as text, as llguidance asks for one: each token's bytes, and texts' tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, known: LLTokenizer, written: Mapping[int, bytes]) -> None:
        """written: what the tokens stand for that `known` takes for no text."""
        self._known = known
        self.eos_token_id = known.eos_token
        ids = range(known.vocab_size)
        self.special_token_ids = [
            token_id for token_id in ids if token_id not in written and known.is_special_token(token_id)
        ]
        self._written = written

    @property
    def tokens(self) -> list[bytes]:
        """By id. Asked for once, and not kept."""
        return [self._bytes_of(token_id) for token_id in range(self._known.vocab_size)]

    def _bytes_of(self, token_id: int) -> bytes:
        if (tag := self._written.get(token_id)) is not None:
            return tag
        stands_for = self._known.decode_bytes([token_id])
        # What stands for nothing is told by its number, as a special token is that has no name.
        is_hole = stands_for == f"<[{token_id}]>".encode() and not self._known.is_special_token(token_id)
        return b"" if is_hole else stands_for

    def __call__(self, text: str) -> list[int]:
        """The tokens that the text is made of: each tag is its own."""
        return self._known.tokenize_str(text)


def _written_tags(backend: Any, known: LLTokenizer, misread: Mapping[int, str]) -> dict[int, bytes]:
    """Tokens that are in texts and that `known` takes for special, or for bytes, with what they are there.

    It does so with every added token that is named like a tag, whether it is marked special or not, such as
    Qwen's `<tool_call>` and `<think>`. Such a one would be masked wherever a text may have it, and, being how
    a text that is forced is spelled, be asked for and then not be taken.
    """
    texts = {
        token_id: misread.get(token_id) or _text_of(backend, token_id)
        for token_id, token in backend.get_added_tokens_decoder().items()
        if token_id < known.vocab_size
        and not token.special
        and (known.is_special_token(token_id) or token_id in misread)
        and token_id not in known.eos_tokens  # an end is no part of a text, whatever it is marked as
    }
    return {token_id: text.encode() for token_id, text in texts.items() if text and REPLACEMENT not in text}


def _text_of(backend: Any, token_id: int) -> str:
    """What a token is inside a text."""
    start = backend.encode("x", add_special_tokens=False).ids
    whole: str = backend.decode([*start, token_id], skip_special_tokens=True)
    return whole.removeprefix(backend.decode(start, skip_special_tokens=True))


def _drawable(written: str, vocab_size: int, ends: Sequence[int]) -> str:
    """The tokenizer, as JSON, with which what a structure forces is its text, of tokens that can be drawn.

    ends: tokens that end a text.
    """
    content = json.loads(written)
    model = content["model"]
    merged = {"".join(pair) for pair in model.get("merges", ())}
    _drop_beyond(content, merged, vocab_size)
    _unspell_special(content, merged, ends)
    _keep_texts(content)
    return json.dumps(content, ensure_ascii=False)


def _drop_beyond(content: dict[str, Any], merged: Set[str], vocab_size: int) -> None:
    """Take out added tokens that have no logits.

    merged: what merges lead to, which stays: the model would lack it.
    """
    kept = [token for token in content["added_tokens"] if token["id"] < vocab_size]
    dropped = {token["content"] for token in content["added_tokens"] if token["id"] >= vocab_size}
    content["added_tokens"] = kept
    vocab = content["model"]["vocab"]
    if isinstance(vocab, dict):
        content["model"]["vocab"] = {
            name: token_id for name, token_id in vocab.items() if name not in dropped - merged
        }


def _unspell_special(content: dict[str, Any], merged: Set[str], ends: Sequence[int]) -> None:
    """Give special tokens names that nobody can write.

    A text that spells a special token would become that token, which is in no text and may end it.
    merged: as for `_drop_beyond`. ends: special, whatever they are marked as.
    """
    model = content["model"]
    secret = uuid.uuid4().hex
    renamed = {
        token["content"]: f"{secret}:{token['id']}"
        for token in content["added_tokens"]
        if (token["special"] or token["id"] in ends) and token["content"] not in merged
    }
    for token in content["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
    # Many have them among the model's own tokens, too.
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {renamed.get(name, name): token_id for name, token_id in vocab.items()}
    else:  # of Unigram
        model["vocab"] = [(renamed.get(name, name), score) for name, score in vocab]
    if (unknown := model.get("unk_token")) is not None:
        model["unk_token"] = renamed.get(unknown, unknown)


def _keep_texts(content: dict[str, Any]) -> None:
    """Take out whatever makes another text of one before it is split: a forced text is meant to the letter.

    What puts another sign for spaces stays: tokens are spelled with it. llguidance itself takes out what puts
    a space before a text, but for the one of byte-level tokenizers.
    """
    normalizer = content["normalizer"]
    kept = [step for step in _steps(normalizer, "normalizers") if step.get("pattern") == {"String": " "}]
    content["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    for step in _steps(content["pre_tokenizer"], "pretokenizers"):
        if step["type"] == "ByteLevel":
            step["add_prefix_space"] = False
    for token in content["added_tokens"]:
        token["lstrip"] = token["rstrip"] = False


def _steps(part: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """A part of a tokenizer, step by step. name: of the steps in a sequence."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for step in part[name]:
        yield from _steps(step, name)
