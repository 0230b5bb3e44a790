"""Prompts become exactly the tokens transformers would make of them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from array import array
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cache.errors import ConfigError
from cache.fingerprint import template_digest
from router.errors import InvalidField, NoChatTemplate, PromptsBusy
from router.prompts.chat import MESSAGE_CHARS, Chat
from router.prompts.prompt import (
    NUM_THREADS,
    OFFLOAD_CHARS,
    PromptEncoder,
)
from router.prompts.segment_cache import PartlyTokenized
from tests.fakes.http import ByteTokenizer
from tests.fakes.tokenizers import CHATML_TOKENS, a_tokenizer

TINY = str(Path(__file__).parents[4] / "replica" / "models" / "tiny")
LLAMA_TEMPLATE = (
    "{{ bos_token }}{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}{% for message in messages %}"
    "{% if loop.index0 and message.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ message.role }}] {{ message.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{% if mood %} {{ mood }}{% endif %}"
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  Wie geht's?\n\n\t日本語 🙂 "},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b <s> </s>"},
        {"role": "user", "content": ""},
    ],
]
TEXTS = [
    "Hello",
    " leading and trailing ",
    "line\nline\r\n",
    "日本語 🙂 é",
    "<s>not twice",
    "x" * 300,
    "<|im_start|>user",
]


def llama_like(folder: Path, *, template: str | None) -> str:
    """A SentencePiece-style tokenizer as Llama 2 has it: byte fallback, a BOS before every text."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ["▁", *map(chr, range(33, 127)), "he", "ll", "hell", "▁hell"]:
        vocab.setdefault(piece, len(vocab))
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("▁", "hell")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.ByteFallback()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _saved(backend, folder, template)


def plain_bytes(folder: Path) -> str:
    """Bytes only, as GPT-2: no special token before a text, no template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE({"<s>": 0, "</s>": 1, "<unk>": 2} | {c: i + 3 for i, c in enumerate(alphabet)}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _saved(backend, folder, None)


def _saved(backend: Tokenizer, folder: Path, template: str | None) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=["tiny", "llama", "bytes"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "tiny":
        return TINY
    folder = tmp_path_factory.mktemp(request.param)
    return llama_like(folder, template=LLAMA_TEMPLATE) if request.param == "llama" else plain_bytes(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PromptEncoder]:
    encoder = PromptEncoder.load(llama_like(tmp_path_factory.mktemp("llama"), template=LLAMA_TEMPLATE))
    yield encoder
    encoder.close()


@pytest.fixture(scope="module")
def tiny() -> Iterator[PromptEncoder]:
    encoder = PromptEncoder.load(TINY)
    yield encoder
    encoder.close()


# --- equality with transformers -------------------------------------------------------------------


def test_texts_are_what_the_tokenizer_makes_of_them(source: str) -> None:
    reference, encoder = AutoTokenizer.from_pretrained(source), PromptEncoder.load(source)
    for text in TEXTS:
        assert encoder.text(text) == array("i", reference(text)["input_ids"])


def test_chats_are_what_the_template_makes_of_them(source: str) -> None:
    reference, encoder = AutoTokenizer.from_pretrained(source), PromptEncoder.load(source)
    if not encoder.has_chat_template:
        with pytest.raises(NoChatTemplate):
            encoder.chat(Chat(CHATS[0]))
        return
    for chat in CHATS:
        ids = reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)["input_ids"]
        assert encoder.chat(Chat(chat)) == array("i", ids)


def test_a_chat_has_one_bos_and_a_text_has_one(llama: PromptEncoder) -> None:
    assert list(llama.chat(Chat(CHATS[0]))).count(1) == 1
    assert list(llama.text("hello")).count(1) == 1
    assert llama.text("hello")[0] == 1


def test_tools_and_template_variables_reach_the_template(llama: PromptEncoder) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    plain = llama.chat(Chat(CHATS[0]))
    assert len(llama.chat(Chat(CHATS[0], tools))) > len(plain)
    assert len(llama.chat(Chat(CHATS[0], template_kwargs={"mood": "glad"}))) > len(plain)


def test_a_chat_that_goes_on_begins_with_the_chat_so_far(tiny: PromptEncoder) -> None:
    so_far = list(CHATS[0])
    closed = tiny.render(Chat(so_far, assistant_is_next=False))
    to_be_answered = tiny.render(Chat(so_far))
    assert to_be_answered.startswith(closed)
    assert to_be_answered != closed
    assert tiny.render(Chat([*so_far, {"role": "user", "content": "And?"}])).startswith(closed)


def test_text_parts_count_as_their_concatenation(tiny: PromptEncoder) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert tiny.chat(Chat([{"role": "user", "content": parts}])) == tiny.chat(Chat(CHATS[0]))


def test_ids_are_told_as_answers_are(llama: PromptEncoder) -> None:
    """Of bytes that are no text the valid ones stay: the library has U+FFFD for each of a run."""
    byte = {each: 3 + each for each in range(256)}
    ids = [byte[0xE4], byte[0xBD], byte[0xA0], byte[0xE5], 2]
    assert llama.decode(ids) == "你\ufffd</s>"
    assert llama.decode_text(ids) == "你\ufffd"


def test_the_template_has_a_digest(tiny: PromptEncoder, tmp_path: Path) -> None:
    assert tiny.template_digest == template_digest(AutoTokenizer.from_pretrained(TINY).chat_template)
    assert tiny.template_digest
    assert PromptEncoder.load(plain_bytes(tmp_path)).template_digest == ""


def test_of_templates_of_which_none_is_the_default_chats_without_tools_have_none(tmp_path: Path) -> None:
    """They were told that the template cannot render their messages."""
    folder = Path(llama_like(tmp_path, template=LLAMA_TEMPLATE))
    (folder / "additional_chat_templates").mkdir()
    (folder / "chat_template.jinja").rename(folder / "additional_chat_templates" / "tool_use.jinja")
    encoder = PromptEncoder.load(str(folder))
    with pytest.raises(NoChatTemplate):
        encoder.chat(Chat(CHATS[0]))
    assert encoder.chat(Chat(CHATS[0], [{"type": "function", "function": {"name": "f"}}]))


# --- what clients get wrong -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "messages"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "\ud800"}], "messages"),
    ],
)
def test_messages_the_template_refuses_are_the_clients_error(
    llama: PromptEncoder, messages: list[dict[str, Any]], param: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        llama.chat(Chat(messages))
    assert caught.value.param == param


def test_the_templates_own_words_reach_the_client(llama: PromptEncoder) -> None:
    with pytest.raises(InvalidField, match="roles must alternate"):
        llama.chat(Chat([{"role": "user", "content": "a"}] * 2))


@pytest.mark.parametrize(
    "key",
    ["chat_template", "tokenize", "return_dict", "bos_token", "conversation", "conversations", "messages"],
)
def test_template_variables_cannot_replace_the_template_or_its_surroundings(
    llama: PromptEncoder, key: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        llama.chat(Chat(CHATS[0], template_kwargs={key: "x"}))
    assert caught.value.param == f"chat_template_kwargs.{key}"


@pytest.mark.parametrize("bad", [-1, 1819, 1 << 40, True, 1.0, "1", None])
def test_token_ids_outside_the_vocabulary_are_named(tiny: PromptEncoder, bad: object) -> None:
    assert tiny.vocab_size == 1819
    with pytest.raises(InvalidField) as caught:
        tiny.ids([5, bad, 6])
    assert caught.value.param == "prompt[1]"


def test_token_ids_pass_unchanged(tiny: PromptEncoder) -> None:
    assert tiny.ids([0, 5, 1818]) == array("i", [0, 5, 1818])


def test_nothing_is_not_a_prompt(tiny: PromptEncoder) -> None:
    for encode in (lambda: tiny.text(""), lambda: tiny.ids([])):
        with pytest.raises(InvalidField, match="at least one token"):
            encode()


def test_lone_surrogates_are_not_text(tiny: PromptEncoder) -> None:
    with pytest.raises(InvalidField, match="Unicode"):
        tiny.text("a\ud800b")


@pytest.mark.parametrize("shape", ["tiny", "bytes", "wordpiece"])
def test_what_is_special_is_what_texts_are_without(shape: str) -> None:
    """Also tokens that are marked special and have no role: `text_offset` counted them as text."""
    header = AddedToken("<|header|>", special=True, normalized=False)
    tokenizer = a_tokenizer(shape, (*CHATML_TOKENS, header, AddedToken("<plain>", normalized=False)))
    encoder = PromptEncoder(tokenizer, name=shape)
    for token in ("<|header|>", "<plain>", "<|im_end|>", "<|im_start|>"):
        (token_id,) = encoder.text(token, add_special_tokens=False)
        is_left_out = encoder.decode_text([token_id]) == ""
        assert encoder.is_special(token_id) is encoder.leaves_out(token) is is_left_out


def test_a_text_that_is_no_token_is_not_left_out(llama: PromptEncoder) -> None:
    """Though its token would be the unknown one, which is special."""
    assert llama.leaves_out("<unk>")
    assert not llama.leaves_out("<tool_call>")


@pytest.mark.parametrize("source", ["/no/such/folder", "./nor/this"])
def test_a_folder_that_is_not_there_is_said_to_be_missing(source: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        PromptEncoder.load(source)


def test_a_folder_without_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="tokenizer"):
        PromptEncoder.load(str(tmp_path))


class _Endless(list[object]):
    def __iter__(self) -> Iterator[object]:
        raise AssertionError("looked into")


@pytest.mark.parametrize(
    "parts",
    [[{"a": "b" * 50, "c": [1, 2, {"d": None}]}], [{"name": "f", "parameters": {"type": "object"}}] * 20],
)
def test_a_chats_size_is_about_what_it_has_as_json(parts: list[Any]) -> None:
    exact = len(json.dumps(parts))
    for chat in (Chat([], parts), Chat([{"role": "assistant", "content": "", "tool_calls": parts}])):
        assert exact / 2 < chat.num_chars(1 << 16) - MESSAGE_CHARS * len(chat.messages) < exact * 2


def test_a_chats_size_is_counted_no_further_than_it_matters() -> None:
    """The event loop waited while millions of parts were written, to be measured."""
    many = [{"a": _Endless([1] * 1000)}]
    assert Chat([], many).num_chars(1000) > 1000
    with pytest.raises(AssertionError, match="looked into"):
        Chat([], many).num_chars(10_000)


# --- threads and torch ----------------------------------------------------------------------------


async def test_what_is_new_and_long_leaves_the_event_loop(
    tiny: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short prompt stays, a long one goes; the same long one again has nothing left to tokenize."""
    assert tiny._cache is not None
    threads: list[str] = []
    plain = tiny._cache.finish

    def watched(begun: PartlyTokenized, *, add_special_tokens: bool) -> array[int]:
        threads.append(threading.current_thread().name)
        return plain(begun, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tiny._cache, "finish", watched)
    here, long = threading.current_thread().name, "word " * OFFLOAD_CHARS
    for text, where in (("short", here), (long, "prompt"), (long, here), (long * 4, "prompt")):
        assert await tiny.encode_text(text) == reference_ids(text)
        assert threads.pop().startswith(where)
        assert await tiny.encode_chat(Chat([{"role": "user", "content": text}]))
        assert threads.pop().startswith(where)


def reference_ids(text: str) -> array[int]:
    return array("i", AutoTokenizer.from_pretrained(TINY)(text)["input_ids"])


def test_salts_and_switching_the_cache_off_change_no_ids(tiny: PromptEncoder) -> None:
    off = PromptEncoder.load(TINY, cache_bytes=0)
    assert off.statistics() is None
    assert off.whole_reason == "the segment cache is switched off"
    for chat in CHATS:
        assert off.chat(Chat(chat)) == tiny.chat(Chat(chat), salt="a") == tiny.chat(Chat(chat), salt="b")
        assert off.render(Chat(chat)) == tiny.render(Chat(chat))
    for text in TEXTS:
        assert off.text(text) == tiny.text(text, salt="a") == tiny.text(text, salt="b")


async def test_errors_come_back_from_the_thread(tiny: PromptEncoder) -> None:
    with pytest.raises(InvalidField):
        await tiny.encode_chat(Chat([{"role": "nobody", "content": "x" * OFFLOAD_CHARS}]))
    with pytest.raises(InvalidField):
        await tiny.encode_ids([0] * 100_000 + [-1])


LONG = "word " * OFFLOAD_CHARS
CALLS: dict[str, Callable[[PromptEncoder], Awaitable[object]]] = {
    "chat": lambda encoder: encoder.encode_chat(Chat([{"role": "user", "content": LONG}])),
    "text": lambda encoder: encoder.encode_text(LONG),
    "ids": lambda encoder: encoder.encode_ids([65] * OFFLOAD_CHARS * 9),
    "job": lambda encoder: encoder.soon(OFFLOAD_CHARS + 1, "", lambda: "done"),
}


@contextmanager
def kept_busy(encoder: PromptEncoder) -> Iterator[None]:
    """All its threads, by another tenant."""
    gate = threading.Event()
    try:
        for _ in range(NUM_THREADS):
            encoder._threads.submit("another", gate.wait)
        yield
    finally:
        gate.set()


@pytest.fixture
def impatient() -> Iterator[PromptEncoder]:
    encoder = PromptEncoder(ByteTokenizer(), name="bytes", max_wait_s=0.02)
    yield encoder
    encoder.close()


@pytest.mark.parametrize("ask", CALLS.values(), ids=CALLS)
async def test_a_prompt_waits_for_a_thread_no_longer_than_it_may(
    impatient: PromptEncoder, ask: Callable[[PromptEncoder], Awaitable[object]]
) -> None:
    """Ten thousand requests may be let in, of a second's work each: they waited for all of it."""
    with kept_busy(impatient):
        ended = await asyncio.gather(*(ask(impatient) for _ in range(5)), return_exceptions=True)
        assert [type(error) for error in ended] == [PromptsBusy] * 5
        assert impatient.num_pending == NUM_THREADS  # nobody is tokenized for nothing
    assert await ask(impatient)


async def test_what_has_begun_is_waited_for(impatient: PromptEncoder) -> None:
    """However long: it could not be stopped, and is done soon."""
    gate = threading.Event()
    asyncio.get_running_loop().call_later(0.1, gate.set)
    assert await impatient._on_thread("", gate.wait)


async def test_without_a_bound_a_prompt_waits_for_its_turn() -> None:
    patient = PromptEncoder(ByteTokenizer(), name="bytes")
    with kept_busy(patient):
        waiting = asyncio.create_task(CALLS["text"](patient))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        assert not waiting.done()
    assert await waiting
    patient.close()


async def test_whoever_gives_up_leaves_the_line(tiny: PromptEncoder) -> None:
    with kept_busy(tiny):
        waiting = asyncio.create_task(tiny.encode_text(f"new {LONG}"))
        await asyncio.sleep(0.01)
        assert tiny.num_pending == NUM_THREADS + 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        assert tiny.num_pending == NUM_THREADS


def test_many_threads_encode_as_one_does(tiny: PromptEncoder) -> None:
    """A tokenizer that changes its own settings on each call fails here with "Already borrowed"."""
    texts = [f"prompt {i} " * 50 for i in range(200)]
    alone = [tiny.text(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tiny.text, texts)) == alone


def test_a_router_process_needs_no_torch() -> None:
    program = (
        "import sys; from router.prompts.prompt import PromptEncoder, hide_torch; hide_torch();"
        "from router.prompts.chat import Chat;"
        f"ids = PromptEncoder.load({TINY!r}).chat(Chat([{{'role': 'user', 'content': 'Hello'}}]));"
        "assert len(ids) > 3; assert 'torch' not in sys.modules; print('without torch')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "without torch", done.stderr
    assert "PyTorch" not in done.stderr
