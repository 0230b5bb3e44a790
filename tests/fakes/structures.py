"""Structures followed without a model: the embedded tokenizer, and a hand that picks among what may come."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from transformers import AutoTokenizer

from cache.messages import GenerateRequest
from cache.structure import Structure, StructureKind
from replica.models.tiny_model import SOURCE
from replica.structures.compiler import compile_structure
from replica.structures.matcher import StructureMatcher
from replica.structures.vocabulary import StructureVocabulary
from tests.fakes.engine import make_request
from tests.fakes.tokenizers import CHATML_TOKENS, TAG_TOKENS, a_tokenizer

END = 2  # the embedded tokenizer's end of a turn


@functools.cache
def tiny_tokenizer() -> object:
    return AutoTokenizer.from_pretrained(SOURCE)


@functools.cache
def tiny_vocabulary() -> StructureVocabulary:
    tokenizer = tiny_tokenizer()
    return StructureVocabulary(tokenizer, vocab_size=len(tokenizer), eos_token_ids=frozenset({0, END}))  # type: ignore[arg-type]


@functools.cache
def tagged_tokenizer(tags: str) -> object:
    """The embedded tokenizer with `TAG_TOKENS` of this name."""
    return a_tokenizer("tiny", (*CHATML_TOKENS, *TAG_TOKENS[tags]))


@functools.cache
def tagged_vocabulary(tags: str) -> StructureVocabulary:
    tokenizer = tagged_tokenizer(tags)
    return StructureVocabulary(tokenizer, vocab_size=len(tokenizer), eos_token_ids=frozenset({0, END}))  # type: ignore[arg-type]


def schema(value: object, *, is_lenient: bool = False) -> Structure:
    return Structure(StructureKind.JSON_SCHEMA, json.dumps(value), is_lenient)


def regex(source: str) -> Structure:
    return Structure(StructureKind.REGEX, source)


# Its first token is followed by more alternatives than the limits allow.
TOO_WIDE = schema(
    {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(1500)}}
)


class TinyDecoder:
    """The embedded tokenizer's text, without its special tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = tiny_tokenizer().decode(list(token_ids), skip_special_tokens=True)  # type: ignore[attr-defined]
        return text


def asked(structure: Structure, seed: int = 0, **sampling: Any) -> GenerateRequest:
    """Nine tokens to be answered so, by default in at most 64."""
    sampling = {"max_tokens": 64, "temperature": 1.0, **sampling}
    return replace(make_request(f"r{seed}", range(9), seed=seed, **sampling), structure=structure)


def follows(structure: Structure, text: str) -> bool:
    """Whether this text, and no more, has the structure: over single bytes."""
    matcher = LLMatcher(LLTokenizer("byte"), structure.grammar(), log_level=0)
    assert not matcher.get_error()
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def deep_structures(num_levels: int) -> list[Structure]:
    """Rules that name the next one, and the same with brackets and with schemas: compiled by recursion."""
    chain = [f"r{level}" for level in range(num_levels)]
    ref = {f"d{level}": {"items": {"$ref": f"#/$defs/d{level + 1}"}} for level in range(num_levels)}
    return [
        Structure(StructureKind.GRAMMAR, _chained(chain, "", "")),
        Structure(StructureKind.GRAMMAR, _chained([name.upper() for name in chain], "", "")),
        Structure(StructureKind.GRAMMAR, _chained(chain[::3], "(" * 20, ")" * 20)),
        schema({"$ref": "#/$defs/d0", "$defs": {**ref, f"d{num_levels}": {"type": "string"}}}),
    ]


def _chained(names: list[str], opened: str, closed: str) -> str:
    pairs = itertools.pairwise(names)
    lines = [f"{name}: {opened}{following}{closed}" for name, following in pairs]
    return "\n".join([f"start: {names[0]}", *lines, f'{names[-1]}: "a"'])


def begun(
    structure: Structure, min_tokens: int = 0, vocabulary: StructureVocabulary | None = None
) -> StructureMatcher:
    return compile_structure(vocabulary or tiny_vocabulary(), structure).begun(min_tokens)


def allowed(matcher: StructureMatcher) -> list[int]:
    """Token ids that may come next."""
    words = np.zeros(matcher.num_words, dtype=np.int32)
    matcher.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return [int(token_id) for token_id in bits.nonzero()[0]]


def walk(
    matcher: StructureMatcher,
    pick: Callable[[list[int]], int],
    *,
    max_tokens: int = 400,
    ends: Container[int] = (0, END),
) -> tuple[list[int], bool]:
    """Tokens up to the text's end, without the one that ended it, and whether it came to one."""
    taken: list[int] = []
    while len(taken) < max_tokens:
        token_id = pick(allowed(matcher))
        if token_id in ends:
            return taken, True
        taken.append(token_id)
        matcher.advance(token_id)
        assert matcher.failure is None
        if matcher.is_over:
            return taken, True
    return taken, False


def at_random(seed: int, *, patience: int = 30) -> Callable[[list[int]], int]:
    """Any at first; after so many tokens, what closes strings, lists and objects rather than what goes on."""
    rng, calls = random.Random(seed), [0]

    def pick(choices: list[int]) -> int:
        calls[0] += 1
        if calls[0] > patience:
            closing = [token_id for token_id in choices if token_id in _closing()]
            if END in choices:
                return END
            if closing:
                return rng.choice(closing)
        return rng.choice(choices)

    return pick


@functools.cache
def _closing() -> frozenset[int]:
    tokenizer = tiny_tokenizer()
    texts = {token_id: tokenizer.decode([token_id]) for token_id in range(len(tokenizer))}  # type: ignore[attr-defined,arg-type]
    return frozenset(
        token_id for token_id, text in texts.items() if text in ('"', "}", "]", ":", ",", '":', '",')
    )


def text_of(token_ids: list[int]) -> str:
    text: str = tiny_tokenizer().decode(token_ids)  # type: ignore[attr-defined]
    return text
