"""Tokenizers of several shapes, built on the spot: the pipelines real models have, with tiny vocabularies."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TINY = str(Path(__file__).parents[2] / "replica" / "models" / "tiny")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What Hermes and Qwen models are taught: tools in the system's turn, calls and their answers between tags.
HERMES = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    '</tools>\nCall one so: <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'tool' %}<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3: it thinks before it answers, unless the template's variable says no.
THINKING = HERMES.removesuffix("{% endif %}") + (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
EFFORT = CHATML + "{% if reasoning_effort is defined %}Reasoning: {{ reasoning_effort }}\n{% endif %}"
# gpt-oss, as far as its shape goes: messages in channels, and a single place before a call.
HARMONY = (
    "{% if tools %}<|start|>developer<|message|># Tools {{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' and message.tool_calls %}"
    "{% if message.content and message.thinking %}{{ raise_exception('Cannot pass both') }}{% endif %}"
    "{% set before = message.content or message.thinking %}"
    "{% if before %}<|start|>assistant<|channel|>analysis<|message|>{{ before }}<|end|>{% endif %}"
    "{% set call = message.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% else %}<|start|>{{ message.role }}"
    "{% if message.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ message.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HARMONY_TOKENS = tuple(
    AddedToken(f"<|{name}|>", special=True, normalized=False)
    for name in ("start", "channel", "message", "constrain", "end", "call", "return")
)

# As a model of Hermes' template writes it.
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Zürich"}}\n</tool_call>'
CHATML_TOKENS = tuple(
    AddedToken(text, special=True, normalized=False)
    for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
)

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# How a vocabulary may have them: as any text, as tokens that texts are without, or, as Qwen's does, as tokens
# that texts spell.
TAG_TOKENS: dict[str, tuple[AddedToken, ...]] = {
    "pieces": (),
    "special": tuple(AddedToken(tag, special=True, normalized=False) for tag in TAGS),
    "plain": tuple(AddedToken(tag, special=False, normalized=False) for tag in TAGS),
    "in brackets": tuple(AddedToken(tag, special=False, normalized=False) for tag in ("[CALL]", "[/CALL]")),
}

SPACES = decoders.Replace("▁", " ")
PIECES = decoders.Sequence([SPACES, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])

_CHARS = [chr(code) for code in range(33, 127)] + ["é", "日", "本", "語"]
_WORDS = ["he", "ll", "hell", "lo", "or", "us", "er", "wor", "ld", "user", "12", "don", "word", "ing"]


def byte_level(*, add_prefix_space: bool = False, nfc: bool = False) -> Tokenizer:
    """GPT-2, Llama 3 and Qwen: bytes, a regular expression that splits words, sometimes NFC before it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    merges = [
        ("h", "e"),
        ("l", "l"),
        ("he", "ll"),
        ("Ġ", "a"),
        ("Ġ", "Ġ"),
        ("Ċ", "Ċ"),
        ("1", "2"),
        ("u", "s"),
    ]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    backend = Tokenizer(models.BPE(vocab, merges))
    if nfc:
        backend.normalizer = normalizers.NFC()
    pattern = Regex(
        r"'s|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def llama_legacy() -> Tokenizer:
    """Llama 2: a space is prepended to every text by the normalizer, bytes where a piece is unknown."""
    backend = Tokenizer(
        models.BPE(_piece_vocab(), _piece_merges(), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def metaspace_bpe(prepend_scheme: str) -> Tokenizer:
    """Llama 2 without `legacy`, Mistral: "first" puts a space before the first piece of a prompt only."""
    backend = Tokenizer(
        models.BPE(_piece_vocab(), _piece_merges(), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=prepend_scheme, split=False)
    return backend


def metaspace_unigram(prepend_scheme: str) -> Tokenizer:
    """T5, Gemma's forerunners: the likeliest pieces of a whole text."""
    pieces = [(piece, -float(index % 7) - 2.0) for index, piece in enumerate(_piece_vocab())]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=prepend_scheme)
    return backend


def wordpiece() -> Tokenizer:
    """BERT: lower case, words and punctuation apart, `##` inside a word."""
    vocab = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2}
    for piece in [*_CHARS, *_WORDS]:
        vocab.setdefault(piece.lower(), len(vocab))
        vocab.setdefault("##" + piece.lower(), len(vocab))
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return backend


SHAPES: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level,
    "bytes+space": lambda: byte_level(add_prefix_space=True),
    "bytes+nfc": lambda: byte_level(nfc=True),
    "llama legacy": llama_legacy,
    "metaspace first": lambda: metaspace_bpe("first"),
    "metaspace always": lambda: metaspace_bpe("always"),
    "unigram first": lambda: metaspace_unigram("first"),
    "unigram never": lambda: metaspace_unigram("never"),
    "wordpiece": wordpiece,
}


def a_tokenizer(
    shape: str,
    added: Sequence[AddedToken] = CHATML_TOKENS,
    *,
    template: str | None = CHATML,
    splits_special: bool = False,
) -> PreTrainedTokenizerFast:
    """A transformers tokenizer of one of `SHAPES`, or the embedded one ("tiny"), with these added tokens."""
    if shape == "tiny":
        tokenizer = AutoTokenizer.from_pretrained(TINY, split_special_tokens=splits_special)
        tokenizer.backend_tokenizer.add_tokens([token for token in added if token not in CHATML_TOKENS])
        return tokenizer
    backend = SHAPES[shape]()
    backend.add_tokens([token for token in added if not token.special])
    backend.add_special_tokens([token for token in added if token.special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=backend.model.unk_token if shape == "wordpiece" else None,
        split_special_tokens=splits_special,
    )
    tokenizer.chat_template = template
    return tokenizer


def with_bytes(shape: str, added: Sequence[AddedToken] = CHATML_TOKENS) -> PreTrainedTokenizerFast:
    """`a_tokenizer` with bytes for what it has no piece for, and a decoder that puts them together."""
    tokenizer = a_tokenizer(shape, added)
    if shape.startswith("unigram"):
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        pieces = [tuple(piece) for piece in model["vocab"]]
        tokenizer.backend_tokenizer.model = models.Unigram(pieces, unk_id=0, byte_fallback=True)
    if not shape.startswith(("bytes", "tiny")):
        tokenizer.backend_tokenizer.decoder = PIECES
    return tokenizer


def _piece_vocab() -> dict[str, int]:
    vocab = {"<unk>": 0}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ["▁", *_CHARS, *_WORDS, "▁he", "▁▁", "▁user", "▁hell"]:
        vocab.setdefault(piece, len(vocab))
    for left, right in _piece_merges():
        vocab.setdefault(left + right, len(vocab))
    return vocab


def _piece_merges() -> list[tuple[str, str]]:
    return [("h", "e"), ("l", "l"), ("he", "ll"), ("▁", "▁"), ("▁", "he"), ("u", "s"), ("1", "2"), ("o", "r")]
