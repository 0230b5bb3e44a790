"""Where a rendered prompt may be cut so that its parts can be tokenized alone: at its special tokens.

    <|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\n
    └── segment ────────────┘└─ segment ─┘└── segment ───────────┘

A segment is a special token with the text behind it, up to the next one. Tokenizers of the `tokenizers`
library find added tokens first, in the raw text, and then treat each piece between two of them alone. So
segments tokenized one by one give what the whole gives, if they are cut as that library cuts:

- leftmost match first and, at one place, the longest, over all added tokens that are looked for in the raw
  text, those included at which nothing is cut (`normalized` ones come later, inside a piece);
- not before a token that takes spaces on its left (`lstrip`) or looks at its neighbours (`single_word`),
  nor before one that begins with a letter or a space: a neighbour that looks or strips would see it;
- with the token left of the text, not without: "first" of a Metaspace pre-tokenizer means first of the
  whole prompt, and a piece behind a token is not first.

What the whole pipeline then does with the parts is not read but tried: `segment_rule` compares segments
with the whole on a few hundred awkward texts, and refuses a tokenizer that differs, draws at random, or
brings code of its own. `tests/property/test_segments.py` holds the rule on random tokenizers and texts.
Knows tokenizers; knows neither templates, caches nor requests.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_OPENERS = frozenset(string.punctuation) - {"_"}  # what a cut token may begin with: no word, no space
_OWN_CODE = ("__call__", "_encode_plus", "_batch_encode_plus", "_call_one", "encode", "apply_chat_template")

_NUM_PROBES = 200  # texts; takes some tens of milliseconds at start
_MAX_PROBE_PIECES = 12
_MAX_PROBE_TOKENS = 64  # of a vocabulary's special tokens, spread evenly: some have thousands
_PROBE_PIECES = (
    *(
        "",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        " \n ",
        "a",
        " a",
        "a ",
        "user\n",
        "\nHello",
        "Hello world",
        " leading",
    ),
    *(
        "trailing ",
        "word",
        "don't",
        "1234",
        " 12",
        "x" * 40,
        "...",
        "?!",
        "<",
        "|>",
        "▁",
        "▁▁a",
        "é",
        "日本語",
    ),
    *(
        " 日本",
        "🙂",
        "\u00a0",
        "e\u0301",
        "_",
        "##a",
        "[",
        "</",
        "\\n",
        "A B  C",
        "def f(x):\n    return x\n",
    ),
)


class AddedToken(Protocol):
    """What `tokenizers.AddedToken` tells."""

    content: str
    lstrip: bool
    rstrip: bool
    single_word: bool
    normalized: bool
    special: bool


@dataclass(frozen=True, slots=True)
class Segmenter:
    """Cuts texts at special tokens. Immutable; safe from several threads."""

    _scan: re.Pattern[str]  # every added token found in raw text: leftmost, then longest
    _cuts: frozenset[str]  # those before which a text may be cut

    @classmethod
    def of(cls, added_tokens: Iterable[AddedToken], *, splits_special: bool = False) -> Segmenter | None:
        """The segmenter of a vocabulary; None if it has no token to cut at.

        splits_special: special tokens in a text are text (`split_special_tokens`).
        """
        raw = [token for token in added_tokens if token.content and not token.normalized]
        cuts = frozenset(
            token.content for token in raw if _may_cut(token) and not (splits_special and token.special)
        )
        return cls(re.compile(_longest_first({token.content for token in raw})), cuts) if cuts else None

    @property
    def cuts(self) -> frozenset[str]:
        """The tokens before which texts are cut."""
        return self._cuts

    def split(self, text: str) -> list[str]:
        """The segments of a text, in order; together they are the text. O(characters)."""
        cuts = self._cuts
        starts = [match.start() for match in self._scan.finditer(text) if match.group() in cuts]
        if not starts:
            return [text] if text else []
        if starts[0]:
            starts.insert(0, 0)
        return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


@dataclass(frozen=True, slots=True)
class SegmentRule:
    """How one tokenizer makes a whole of its segments; `encode` gives the ids of one text, nothing added."""

    segmenter: Segmenter
    encode: Callable[[str], list[int]]
    prefix: tuple[int, ...]  # what the tokenizer puts around a text by default: a BOS, usually
    suffix: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WholeOnly:
    """This tokenizer's texts are tokenized whole."""

    reason: str


def segment_rule(tokenizer: Any) -> SegmentRule | WholeOnly:
    """How to tokenize by segment with a transformers tokenizer, or why not.

    Takes some tens of milliseconds. The tokenizer must have been called once (that settles truncation and
    padding), and nobody may change it afterwards.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or _has_own_code(tokenizer):
        return WholeOnly("its tokenizer is not a plain one of the tokenizers library")
    if getattr(backend.model, "dropout", None) or getattr(backend.model, "nbest_size", None):
        return WholeOnly("its tokenizer draws at random")
    segmenter = Segmenter.of(
        tokenizer.added_tokens_decoder.values(), splits_special=bool(backend.encode_special_tokens)
    )
    if segmenter is None:
        return WholeOnly("its vocabulary has no special token to cut at")

    def encode(text: str) -> list[int]:
        # The fast form leaves out offsets, which nobody reads: a quarter of the time.
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    return _tried(tokenizer, segmenter, encode)


def _tried(
    tokenizer: Any, segmenter: Segmenter, encode: Callable[[str], list[int]]
) -> SegmentRule | WholeOnly:
    around = _added_around(tokenizer)
    if around is None:
        return WholeOnly("its tokenizer changes what it adds around a text")
    rule = SegmentRule(segmenter, encode, *around)
    for text in probe_texts(segmenter.cuts):
        parts = [token_id for segment in segmenter.split(text) for token_id in encode(segment)]
        if parts != _whole(tokenizer, text, add_special_tokens=False):
            return WholeOnly("its tokenizer gives other tokens for segments than for the whole")
        if [*rule.prefix, *parts, *rule.suffix] != _whole(tokenizer, text, add_special_tokens=True):
            return WholeOnly("its tokenizer changes what it adds around a text")
    return rule


def probe_texts(cuts: Iterable[str], seed: int = 0) -> list[str]:
    """Awkward texts around these tokens; the same for the same tokens and seed."""
    rng = random.Random(seed)
    tokens = sorted(cuts)
    tokens = tokens[:: -(-len(tokens) // _MAX_PROBE_TOKENS)]
    return [_probe_text(tokens, rng) for _ in range(_NUM_PROBES)]


def _probe_text(tokens: Sequence[str], rng: random.Random) -> str:
    pieces = [
        rng.choice(tokens if rng.random() < 0.4 else _PROBE_PIECES)
        for _ in range(rng.randint(0, _MAX_PROBE_PIECES))
    ]
    return "".join(pieces)


def _added_around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """What the tokenizer adds before and after a text; None if that cannot be told."""
    plain = _whole(tokenizer, "a", add_special_tokens=False)
    full = _whole(tokenizer, "a", add_special_tokens=True)
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start]), tuple(full[start + len(plain) :])
    return None


def _whole(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return list(ids)


def _has_own_code(tokenizer: Any) -> bool:
    """Whether its class encodes or renders in a way of its own, which need not be the library's."""
    from transformers import PreTrainedTokenizerFast

    plain, own = PreTrainedTokenizerFast, type(tokenizer)
    return not isinstance(tokenizer, plain) or any(
        getattr(own, name, None) is not getattr(plain, name, None) for name in _OWN_CODE
    )


def _may_cut(token: AddedToken) -> bool:
    return token.content[0] in _OPENERS and not token.lstrip and not token.single_word


def _longest_first(words: Iterable[str]) -> str:
    """A regular expression for the longest of these words at a place.

    A tree of their common beginnings, since some vocabularies have thousands (`<unused0>`, ...) and an
    alternation of all would try each of them at every `<`.
    """
    by_first: dict[str, list[str]] = {}
    is_end = False
    for word in words:
        if word:
            by_first.setdefault(word[0], []).append(word)
        else:
            is_end = True
    branches = [_branch(group) for _, group in sorted(by_first.items())]
    if not branches:
        return ""
    tree = branches[0] if len(branches) == 1 and not is_end else f"(?:{'|'.join(branches)})"
    return f"{tree}?" if is_end else tree


def _branch(words: Sequence[str]) -> str:
    """The same for words with a first character in common."""
    first, last = min(words), max(words)
    length = next((i for i, char in enumerate(first) if char != last[i : i + 1]), len(first))
    return re.escape(first[:length]) + _longest_first({word[length:] for word in words})
