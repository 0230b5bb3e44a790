"""The detokenizer's laws, over random token streams of a real byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache.messages import FinishReason, SamplingParams
from replica.output.detokenizer import Detokenizer
from tests.fakes.engine import TokenizersDecoder

DECODER = TokenizersDecoder()
VOCAB_SIZE = DECODER.tokenizer.get_vocab_size()
SPECIAL = [0, 1, 2]
# Ids of single bytes that no UTF-8 character starts or ends with cleanly: where decoders go wrong.
LONE_BYTES = [i for i in range(VOCAB_SIZE) if DECODER.decode([i]) == "\ufffd"]

TEXTS = st.text(alphabet=st.sampled_from("ab .,\n|é€日本語🙂👩\u200d👧\ufffdÀ"), max_size=40).map(
    DECODER.encode
)
TOKENS = st.one_of(
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60),
    st.lists(st.sampled_from(LONE_BYTES), max_size=60),
    st.lists(st.sampled_from(LONE_BYTES + SPECIAL + list(range(3, 40))), max_size=60),
    st.lists(st.sampled_from(SPECIAL), max_size=60),
    TEXTS,
    st.tuples(TEXTS, TEXTS).map(lambda pair: [t for both in zip(*pair, strict=False) for t in both]),
)


def run(
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
        DECODER,
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


@given(TOKENS, st.lists(st.booleans(), max_size=60))
@example(LONE_BYTES[:1] * 40, [])
@example(DECODER.encode("👩\u200d👧🙂"), [])
@example([*LONE_BYTES[:1] * 9, *DECODER.encode("🙂")[:1], 0, *DECODER.encode("🙂")[1:]], [])
@settings(max_examples=400)
def test_deltas_joined_are_the_full_decode(tokens: list[int], takes: list[bool]) -> None:
    """Whenever text is taken, and whatever bytes the tokens cut in two."""
    assert run(tokens, takes=takes)[0] == DECODER.decode(tokens)


@given(TOKENS, TOKENS)
@settings(max_examples=200)
def test_a_prompt_changes_nothing_where_each_token_stands_for_its_bytes(
    prompt: list[int], tokens: list[int]
) -> None:
    """What the output is decoded behind ends with a character, so that no byte of it is completed there."""
    assert run(tokens, prompt=prompt)[0] == DECODER.decode(tokens)


@given(TOKENS)
@settings(max_examples=200)
def test_no_text_is_taken_back(tokens: list[int]) -> None:
    """At every moment the text given out so far is the beginning of what the whole decodes to."""
    full = DECODER.decode(tokens)
    detokenizer = Detokenizer(
        DECODER, SamplingParams(max_tokens=1000), frozenset(), max_tokens=max(1, len(tokens))
    )
    shown = ""
    for token_id in tokens:
        detokenizer.push(token_id)
        shown += detokenizer.take()
        assert full.startswith(shown)


@given(TOKENS, st.lists(st.text(alphabet="ab .,|é€日🙂", min_size=1, max_size=3), min_size=1, max_size=3))
@settings(max_examples=400)
def test_text_ends_where_the_first_stop_begins(tokens: list[int], stops: list[str]) -> None:
    """A stop string ends the text right before it, wherever tokens and deltas cut it."""
    text, reason, used = run(tokens, stop=tuple(stops))
    full = DECODER.decode(tokens[:used])
    found = [at for stop in stops if (at := full.find(stop)) >= 0]
    if found:
        assert (text, reason) == (full[: min(found)], FinishReason.STOP)
    else:
        assert text == DECODER.decode(tokens)
        assert used == len(tokens)


@given(TOKENS, st.data(), st.sampled_from([(), ("a",), (" .", "b|"), ("€",)]), st.integers(0, 5))
@settings(max_examples=300)
def test_a_continued_stream_gives_the_rest(
    tokens: list[int], data: st.DataObject, stops: tuple[str, ...], min_tokens: int
) -> None:
    """For every cut: text already sent and text after the cut are the uninterrupted text."""
    whole, reason, used = run(tokens, stop=stops, min_tokens=min_tokens)
    sent_chars = data.draw(st.integers(0, len(whole)))
    assert run(tokens, stop=stops, min_tokens=min_tokens, sent_chars=sent_chars) == (
        whole[sent_chars:],
        reason,
        used,
    )


class CountingDecoder(TokenizersDecoder):
    """Counts the tokens it decodes: the work done."""

    num_decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids)


@given(st.sampled_from([LONE_BYTES[:1], SPECIAL, [*LONE_BYTES[3:6], 0], DECODER.encode("日本語 text, ")]))
@settings(max_examples=10)
def test_work_grows_with_the_output_not_with_its_square(pattern: list[int]) -> None:
    """A model stuck in a loop, even of broken bytes, must not bring the engine to a halt."""
    work = []
    for length in (300, 1200):
        decoder = CountingDecoder()
        detokenizer = Detokenizer(decoder, SamplingParams(max_tokens=9999), frozenset(), max_tokens=9999)
        for index in range(length):
            detokenizer.push(pattern[index % len(pattern)])
            detokenizer.take()
        work.append(decoder.num_decoded)
    assert work[1] < 6 * work[0]
