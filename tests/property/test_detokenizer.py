"""The detokenizer's laws, over random token streams of tokenizers of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cache.messages import FinishReason, SamplingParams
from replica.output import detokenizer as module
from replica.output.detokenizer import Detokenizer, TokenDecoder
from tests.fakes.decoders import LlamaDecoder, SentencePieceDecoder
from tests.fakes.engine import TokenizersDecoder

ALPHABET = "ab .,\n|é€日本語你🙂👩\u200d👧\ufffdÀ"


class Coder(TokenDecoder, Protocol):
    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, eq=False, repr=False)
class Kind:
    """A tokenizer's decoder and the tokens to try it with."""

    name: str
    decoder: Coder
    vocab_size: int
    special: tuple[int, ...]

    def __repr__(self) -> str:
        return self.name

    def lone_bytes(self) -> list[int]:
        """Ids of bytes that are no character by themselves: where decoders go wrong."""
        return [i for i in range(self.vocab_size) if self.decoder.decode([i]) == "\ufffd"]

    def texts(self) -> st.SearchStrategy[list[int]]:
        return st.text(alphabet=st.sampled_from(ALPHABET), max_size=40).map(self.decoder.encode)

    def streams(self) -> st.SearchStrategy[list[int]]:
        lone = self.lone_bytes()
        ordinary = [i for i in range(self.vocab_size) if i not in lone][:40]
        texts = self.texts()
        return st.one_of(
            st.lists(st.integers(0, self.vocab_size - 1), max_size=60),
            st.lists(st.sampled_from(lone), max_size=60),
            st.lists(st.sampled_from([*lone, *self.special, *ordinary]), max_size=60),
            st.lists(st.sampled_from(self.special), max_size=60),
            texts,
            st.tuples(texts, texts).map(lambda pair: [t for both in zip(*pair, strict=False) for t in both]),
            st.lists(st.one_of(texts, st.lists(st.sampled_from(lone), max_size=3)), max_size=6).map(
                lambda parts: [t for part in parts for t in part][:90]
            ),
        )


DECODER, LLAMA_DECODER = TokenizersDecoder(), LlamaDecoder()
BYTE_LEVEL = Kind("byte-level", DECODER, DECODER.tokenizer.get_vocab_size(), (0, 1, 2))
LLAMA = Kind(
    "byte fallback",
    LLAMA_DECODER,
    LLAMA_DECODER.tokenizer.get_vocab_size(),
    tuple(LLAMA_DECODER.tokenizer.token_to_id(name) for name in ("<s>", "</s>")),
)
SENTENCEPIECE = Kind("bytes each", SentencePieceDecoder(), 258, (256, 257))
KINDS = (BYTE_LEVEL, LLAMA, SENTENCEPIECE)
LONE_BYTES = BYTE_LEVEL.lone_bytes()

Stream = tuple[Kind, list[int]]
STREAMS = st.one_of(*(st.tuples(st.just(kind), kind.streams()) for kind in KINDS))


def run(
    decoder: TokenDecoder,
    tokens: Sequence[int],
    *,
    takes: Sequence[bool] = (),
    sent_chars: int = 0,
    prompt: Sequence[int] = (),
    **sampling: object,
) -> tuple[str, FinishReason | None, int]:
    """All text given out, the reason to stop, and how many tokens were taken."""
    params = SamplingParams(max_tokens=max(1, len(tokens)), ignore_eos=True, **sampling)  # type: ignore[arg-type]
    detokenizer = Detokenizer(
        decoder,
        params,
        frozenset({2}),
        max_tokens=params.max_tokens,
        sent_chars=sent_chars,
        prompt=prompt,
    )
    text, reason, used = "", None, 0
    for index, token_id in enumerate(tokens):
        reason = detokenizer.push(token_id)
        used += 1
        if index >= len(takes) or takes[index]:
            text += detokenizer.take()
        if reason is not None:
            break
    return text + detokenizer.take(), reason, used


@given(STREAMS, st.lists(st.booleans(), max_size=60))
@example((BYTE_LEVEL, LONE_BYTES[:1] * 40), [])
@example((BYTE_LEVEL, DECODER.encode("👩\u200d👧🙂")), [])
@example(
    (BYTE_LEVEL, [*LONE_BYTES[:1] * 9, *DECODER.encode("🙂")[:1], 0, *DECODER.encode("🙂")[1:]]),
    [],
)
@example((LLAMA, LLAMA_DECODER.encode("a你本語 b")), [False, False, True])
@example((LLAMA, [*LLAMA_DECODER.encode(" "), *LLAMA.special * 5, *LLAMA_DECODER.encode(" a")]), [])
@example((SENTENCEPIECE, [*b"\x80" * 7, *b"\xf0\x9f", *[256] * 8, *b"\x99\x82"]), [])
@settings(max_examples=300)
def test_deltas_joined_are_the_full_decode(stream: Stream, takes: list[bool]) -> None:
    """Whenever text is taken, and whatever bytes the tokens cut in two."""
    kind, tokens = stream
    assert run(kind.decoder, tokens, takes=takes)[0] == kind.decoder.decode(tokens)


@given(st.one_of(*(st.tuples(st.just(kind), kind.streams(), kind.streams()) for kind in KINDS)))
@settings(max_examples=300)
def test_a_prompt_changes_nothing_but_the_first_space(pair: tuple[Kind, list[int], list[int]]) -> None:
    """What the output is decoded behind ends with a character, so that no byte of it is completed there."""
    kind, prompt, tokens = pair
    alone = kind.decoder.decode(tokens)
    expected = (alone, " " + alone) if kind is LLAMA else (alone,)
    assert run(kind.decoder, tokens, prompt=prompt)[0] in expected


@given(st.one_of(*(st.tuples(st.just(kind), kind.texts(), kind.streams()) for kind in KINDS)))
@example((LLAMA, LLAMA_DECODER.encode("你"), LLAMA_DECODER.encode("🙂 你a")))
@settings(max_examples=200)
def test_a_text_is_what_is_added_to_the_prompts(pair: tuple[Kind, list[int], list[int]]) -> None:
    """Also where the prompt ends in a character's bytes and the output begins with such."""
    kind, prompt, tokens = pair
    before = kind.decoder.decode(prompt)
    assume(before and not before.endswith("\ufffd"))
    whole = kind.decoder.decode([*prompt, *tokens])
    assert before + run(kind.decoder, tokens, prompt=prompt)[0] == whole


@given(STREAMS)
@settings(max_examples=300)
def test_no_text_is_taken_back_nor_held_without_need(stream: Stream) -> None:
    """At every moment it is the beginning of the whole's; what lacks is a character that is not whole."""
    kind, tokens = stream
    full = kind.decoder.decode(tokens)
    detokenizer = Detokenizer(
        kind.decoder, SamplingParams(max_tokens=1000), frozenset(), max_tokens=max(1, len(tokens))
    )
    shown = ""
    for count, token_id in enumerate(tokens, start=1):
        detokenizer.push(token_id)
        shown += detokenizer.take()
        assert full.startswith(shown)
        assert kind.decoder.decode(tokens[:count]).removeprefix(shown) in (
            "",
            *("\ufffd" * n for n in (1, 2, 3)),
        )


@given(STREAMS, st.lists(st.text(alphabet="ab .,|é€日你🙂", min_size=1, max_size=3), min_size=1, max_size=3))
@example((LLAMA, LLAMA_DECODER.encode("你本語 b")), ["本"])
@settings(max_examples=300)
def test_text_ends_where_the_first_stop_begins(stream: Stream, stops: list[str]) -> None:
    """A stop string ends the text right before it, wherever tokens and deltas cut it."""
    kind, tokens = stream
    text, reason, used = run(kind.decoder, tokens, stop=tuple(stops))
    full = kind.decoder.decode(tokens[:used])
    found = [at for stop in stops if (at := full.find(stop)) >= 0]
    if found:
        assert (text, reason) == (full[: min(found)], FinishReason.STOP)
    else:
        assert text == kind.decoder.decode(tokens)
        assert used == len(tokens)


@given(STREAMS, st.data(), st.sampled_from([(), ("a",), (" .", "b|"), ("€",)]), st.integers(0, 5))
@settings(max_examples=200)
def test_a_continued_stream_gives_the_rest(
    stream: Stream, data: st.DataObject, stops: tuple[str, ...], min_tokens: int
) -> None:
    """For every cut: text already sent and text after the cut are the uninterrupted text."""
    kind, tokens = stream
    whole, reason, used = run(kind.decoder, tokens, stop=stops, min_tokens=min_tokens)
    sent_chars = data.draw(st.integers(0, len(whole)))
    assert run(kind.decoder, tokens, stop=stops, min_tokens=min_tokens, sent_chars=sent_chars) == (
        whole[sent_chars:],
        reason,
        used,
    )


@given(
    STREAMS,
    st.data(),
    st.lists(st.text(alphabet="ab .,|é€日你🙂\ufffd", min_size=1, max_size=3), max_size=3),
    st.integers(0, 90),
    st.integers(1, 9),
)
@settings(max_examples=300)
def test_tokens_pushed_at_once_are_tokens_pushed_one_by_one(
    stream: Stream, data: st.DataObject, stops: list[str], min_tokens: int, chunk_tokens: int
) -> None:
    """However many, whatever lies among them, and wherever they are cut: text, reason and what follows."""
    kind, tokens = stream
    cut = data.draw(st.integers(0, len(tokens)))
    stop_token_ids = tuple(data.draw(st.lists(st.sampled_from(tokens or [0]), max_size=1)))
    params = SamplingParams(
        max_tokens=90, min_tokens=min_tokens, stop=tuple(stops), stop_token_ids=stop_token_ids
    )
    max_tokens, sent_chars = data.draw(st.integers(1, 90)), data.draw(st.integers(0, 9))
    prompt = data.draw(kind.texts())
    single, joined = (
        Detokenizer(
            kind.decoder,
            params,
            frozenset({2}),
            max_tokens=max_tokens,
            sent_chars=sent_chars,
            prompt=prompt[-8:],
        )
        for _ in range(2)
    )
    for token_id in tokens[:cut]:
        if single.push(token_id) is not None:
            break
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_TOKENS", chunk_tokens)
        assert joined.push_all(tokens[:cut]) == single.finish_reason
    assert joined.take() == single.take()
    for token_id in tokens[cut:]:
        if single.finish_reason is not None:
            break
        assert joined.push(token_id) == single.push(token_id)
        assert joined.take() == single.take()
    if single.finish_reason is None:
        assert joined.end() == single.end()
        assert joined.take() == single.take()


@pytest.mark.parametrize("kind", KINDS, ids=repr)
@pytest.mark.parametrize(("text", "max_calls"), [("ab .,", 300), ("日本語 text, 你你", 1000)])
@pytest.mark.parametrize("min_tokens", [0, 5, 600, 2000])
def test_earlier_tokens_need_no_decode_each(kind: Kind, text: str, max_calls: int, min_tokens: int) -> None:
    """With stop strings a stream that was handed over cost two for each token, before the next step. In the
    second text a chunk may end within a character."""
    tokens = (kind.decoder.encode(text) * 1200)[:1200]
    decoder = CountingDecoder(kind.decoder)
    params = SamplingParams(max_tokens=2000, min_tokens=min_tokens, stop=("never",), ignore_eos=True)
    detokenizer = Detokenizer(decoder, params, frozenset(), max_tokens=2000)
    assert detokenizer.push_all(tokens) is None
    assert decoder.num_calls < max_calls
    assert detokenizer.take() == kind.decoder.decode(tokens)


class CountingDecoder:
    """Counts the tokens it decodes: the work done."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self.num_calls = self.num_decoded = self.longest = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_calls += 1
        self.num_decoded += len(token_ids)
        self.longest = max(self.longest, len(token_ids))
        return self._decoder.decode(token_ids)


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_work_grows_with_the_output_not_with_its_square(kind: Kind) -> None:
    """A model stuck in a loop, even of broken bytes, must not bring the engine to a halt."""
    lone, special, text = kind.lone_bytes(), list(kind.special), kind.decoder.encode("日本語 text, 你你")
    for begin, loop in [
        ([], lone[:1]),
        ([], lone[-1:]),
        ([], [*lone[3:6], *special]),
        ([], special),
        (lone[:1], special),
        (kind.decoder.encode(" "), special),
        ([], text),
    ]:
        short, long = (work(kind, [*begin, *loop * (times // len(loop))]) for times in (300, 1200))
        assert long.num_decoded < 6 * short.num_decoded
        assert long.longest == short.longest < 40


def work(kind: Kind, tokens: Sequence[int]) -> CountingDecoder:
    decoder = CountingDecoder(kind.decoder)
    run(decoder, tokens)
    return decoder
