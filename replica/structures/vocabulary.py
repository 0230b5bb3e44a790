"""The model's tokens as the bytes they stand for: what a grammar is followed over.

Knows tokenizers and llguidance's view of them; knows no grammar and no request.
"""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Set
from typing import Any

import numpy as np

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
        try:
            self.tokens = LLTokenizer(
                _drawable(backend.to_str(), vocab_size),
                n_vocab=vocab_size,
                eos_token=named or own_named or None,
            )
        except ValueError as error:
            raise TokenizerUnsuited(str(error)) from error
        self.vocab_size = vocab_size
        self.num_words = -(-self.tokens.vocab_size // 32)
        # A mask of everything but what ends a text, lowest bit first.
        self.without_ends = np.full(self.num_words, -1, dtype=np.int32)
        for token_id in self.tokens.eos_tokens:
            self.without_ends.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        self._check(backend, min(vocab_size, backend.get_vocab_size()))

    def _check(self, backend: Any, num_tokens: int) -> None:
        """Compare the bytes with what the tokenizer itself makes of a token inside a text."""
        start = backend.encode("x", add_special_tokens=False).ids
        start_text = backend.decode(start, skip_special_tokens=True)
        for token_id in range(0, num_tokens, max(1, num_tokens // CHECKED_TOKENS)):
            if token_id in self.tokens.eos_tokens or self.tokens.is_special_token(token_id):
                continue
            whole = backend.decode([*start, token_id], skip_special_tokens=True)
            text = whole.removeprefix(start_text)
            stands_for = self.tokens.decode_bytes([token_id]).decode("utf-8", "replace")
            if REPLACEMENT not in text and REPLACEMENT not in stands_for and text != stands_for:
                raise TokenizerUnsuited(f"token {token_id} decodes otherwise than its bytes say")


def _drawable(written: str, vocab_size: int) -> str:
    """The tokenizer, as JSON, with which what a structure forces is its text, of tokens that can be drawn."""
    content = json.loads(written)
    model = content["model"]
    merged = {"".join(pair) for pair in model.get("merges", ())}
    _drop_beyond(content, merged, vocab_size)
    _unspell_special(content, merged)
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


def _unspell_special(content: dict[str, Any], merged: Set[str]) -> None:
    """Give special tokens names that nobody can write.

    A text that spells a special token would become that token, which is in no text and may end it.
    merged: as for `_drop_beyond`.
    """
    model = content["model"]
    secret = uuid.uuid4().hex
    renamed = {
        token["content"]: f"{secret}:{token['id']}"
        for token in content["added_tokens"]
        if token["special"] and token["content"] not in merged
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
