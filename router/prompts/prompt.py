"""From what a client sent to the token ids the engine will see: chat, text or ids.

One path for all: what comes out is exactly what transformers' `apply_chat_template(messages,
add_generation_prompt=True)` and `tokenizer(text)` give, so the router's block hashes are the engine's; but
for messages that only call tools (`past_calls.py`), since some templates would lose the calls.
A chat's template writes its own special tokens, a text gets the tokenizer's default ones; never both.
What was tokenized before is not tokenized again: segments between special tokens are looked up first
(`segment_cache.py`), unless the tokenizer is one whose segments do not make the whole (`segments.py`).
Tokenizers load without remote code and without torch, which this process never needs (`hide_torch`).

Knows tokenizers and templates; knows neither HTTP, blocks nor replicas.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cache import heap
from cache.errors import ConfigError
from cache.fair_threads import FairThreads
from cache.tokenizer_decoder import TokenizerDecoder
from cache.types import pack_tokens
from router.errors import InvalidField, PromptsBusy
from router.prompts.chat import Chat
from router.prompts.long_texts import PART_CHARS, LongTexts
from router.prompts.segment_cache import DEFAULT_CACHE_BYTES, CacheStatistics, PartlyTokenized, SegmentCache
from router.prompts.segments import WholeOnly, segment_rule
from router.prompts.template_check import template_fault
from router.prompts.templates import ChatTemplates, only_what_renders
from router.prompts.token_bytes import token_bytes_of

OFFLOAD_CHARS = 4096  # more to tokenize takes milliseconds: on a thread, not in the event loop
# Up to here, rendering and looking up take a millisecond or two: templates go through messages in Python.
RENDER_OFFLOAD_CHARS, RENDER_OFFLOAD_MESSAGES = 1 << 16, 256
NUM_THREADS = 2  # tokenizers release the GIL while they encode

T = TypeVar("T")

logger = logging.getLogger(__name__)


def hide_torch() -> None:
    """Keep torch out of this process's transformers: 180 MB and a second less for every Router.

    For processes that run no model, before anything imports transformers; later, or where torch is
    already in, nothing happens. transformers decides once, at its import, and remembers.
    """
    if "transformers" in sys.modules or "torch" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    sys.modules["torch"] = None  # type: ignore[assignment]  # the documented way to say "not importable"
    try:
        with heap.without_collections():
            import transformers.utils  # noqa: F401
    finally:
        del sys.modules["torch"]


class PromptEncoder:
    """Encodes prompts with one tokenizer. Safe to call from several threads.

    The plain methods work where they are called; the `encode_*` ones and `soon` are for an event loop and
    move what is long to a thread, where tenants take turns: they raise PromptsBusy if that turn does not
    come in time. `close` when done.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        name: str,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        max_wait_s: float | None = None,
    ) -> None:
        """tokenizer: a transformers tokenizer; name: for error messages. Prefer `load`.

        cache_bytes: room for segments tokenized before; 0 = tokenize everything every time.
        max_wait_s: that a prompt waits for a thread; None = no bound.
        """
        self._tokenizer = tokenizer
        self._templates = ChatTemplates(tokenizer, name)
        self.template_digest = self._templates.digest
        self.vocab_size: int = max(tokenizer.get_vocab().values()) + 1  # ids may have holes
        self._spell = token_bytes_of(tokenizer)
        self._decoder = TokenizerDecoder(tokenizer)
        self._spelling_decoder = TokenizerDecoder(tokenizer, spells_special=True)
        self._token_bytes: dict[int, bytes] = {}  # as far as asked for; never more than the vocabulary
        self._special_ids = _left_out_of(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        self._special_texts = frozenset(str(token) for id_, token in added if id_ in self._special_ids)
        # Serve lets in thousands of requests: minutes of work. Bounded by time and not by their number, since
        # many short ones that come together are done in a moment.
        self._threads = FairThreads(NUM_THREADS, "prompt")
        self._max_wait_s = max_wait_s
        # A first call settles truncation and padding inside the tokenizer; after it calls only read, and
        # may overlap ("Already borrowed" otherwise).
        tokenizer("", verbose=False)
        self._cache: SegmentCache | None = None
        self.whole_reason: str | None = None  # why prompts are tokenized whole; None = by segment
        if not cache_bytes:
            self.whole_reason = "the segment cache is switched off"
        elif isinstance(rule := segment_rule(tokenizer), WholeOnly):
            self.whole_reason = rule.reason
            logger.warning("tokenizing whole prompts", extra={"tokenizer": name, "reason": rule.reason})
        else:
            self._cache = SegmentCache(rule, cache_bytes)
        self._long_texts = LongTexts(self._num_tokens)

    @classmethod
    def load(
        cls,
        source: str,
        revision: str | None = None,
        *,
        name: str | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        max_wait_s: float | None = None,
    ) -> PromptEncoder:
        """The tokenizer of a local folder or hub repository. Blocks for seconds. Raises ConfigError.

        name: what clients call the model, for error messages: a folder's path is not their business.
        """
        tokenizer = _load(source, revision)
        return cls(tokenizer, name=name or source, cache_bytes=cache_bytes, max_wait_s=max_wait_s)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def chat_template(self, *, has_tools: bool) -> str | None:
        """The template that renders a chat: of several, the one for tools if there are some."""
        return self._templates.of(has_tools=has_tools)

    def names_variable(self, name: str, *, has_tools: bool) -> bool:
        """Whether the template that renders a chat looks at a variable of this name."""
        template = self.chat_template(has_tools=has_tools) or ""
        return re.search(rf"\b{re.escape(name)}\b", template) is not None

    def close(self) -> None:
        """Stop the threads; prompts on them finish. Idempotent."""
        self._threads.close()

    @property
    def num_pending(self) -> int:
        """Prompts that wait for a thread, or are on one. Any thread."""
        return self._threads.num_pending

    def statistics(self) -> CacheStatistics | None:
        """The segment cache's; None where prompts are tokenized whole. Any thread."""
        return self._cache.statistics() if self._cache is not None else None

    # --- where they are called ----------------------------------------------------------------

    def render(self, chat: Chat) -> str:
        """A chat as the model reads it.

        Raises NoChatTemplate, or InvalidField when the template refuses the messages.
        """
        rendered: str = self._templates.apply(chat, tokenize=False)
        return rendered

    def chat(self, chat: Chat, *, salt: str = "", limit: int | None = None) -> array[int]:
        """Token ids of a chat: those of `render`'s text.

        salt: whose prompt it is; what was tokenized under another salt is tokenized again. limit: tokens that
        fit the model; what is far longer is not tokenized to its end.
        Raises what `render` raises, and PromptFarTooLong.
        """
        if self._cache is None and chat.num_chars(PART_CHARS) <= PART_CHARS:
            return self._packed(self._templates.apply(chat, tokenize=True), "messages")
        rendered = self.render(chat)
        with only_what_renders(), self._long_texts.turn(rendered, limit, "messages"):
            if self._cache is None:
                return self._packed(self._templates.apply(chat, tokenize=True), "messages")
            return self._finish_chat(self._cache.begin(rendered, salt))

    def text(
        self,
        text: str,
        *,
        param: str = "prompt",
        salt: str = "",
        add_special_tokens: bool = True,
        limit: int | None = None,
    ) -> array[int]:
        """Token ids of a text, with the special tokens its tokenizer adds by default, or without.

        salt, limit: as in `chat`. Raises InvalidField, of which PromptFarTooLong is one.
        """
        with _only_unicode(param), self._long_texts.turn(text, limit, param):
            if self._cache is not None:
                return self._finish_text(self._cache.begin(text, salt), param, add_special_tokens)
            ids = self._tokenizer(text, verbose=False, add_special_tokens=add_special_tokens)["input_ids"]
            return self._packed(ids, param)

    def ids(
        self, token_ids: Sequence[object], *, param: str = "prompt", vocab_size: int | None = None
    ) -> array[int]:
        """Token ids given as such, checked against the vocabulary. Raises InvalidField.

        vocab_size: ids that the model has; None = as many as the tokenizer.
        """
        end = self.vocab_size if vocab_size is None else vocab_size
        for index, token_id in enumerate(token_ids):
            if type(token_id) is not int or not 0 <= token_id < end:
                raise InvalidField(
                    f"{param}[{index}]", f"'{param}[{index}]' must be a token id from 0 to {end - 1}."
                )
        return self._packed(token_ids, param)

    def check_known(self, token_ids: array[int], vocab_size: int, *, param: str) -> None:
        """Raises InvalidField where a prompt has a token that the model, of so many ids, does not know.

        O(1) unless the tokenizer has such tokens.
        """
        if vocab_size >= self.vocab_size:
            return
        largest = int(np.frombuffer(token_ids, dtype=np.int32).max())
        if largest >= vocab_size:
            raise InvalidField(
                param,
                f"{param!r} has a token that the model does not know, id {largest}: its ids are from 0 to "
                f"{vocab_size - 1}.",
            )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids below `vocab_size`, special tokens included, nothing cleaned up."""
        return self._spelling_decoder.decode(token_ids)

    def decode_text(self, token_ids: Sequence[int]) -> str:
        """`decode` without special tokens, as answers are written."""
        return self._decoder.decode(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, which need not be whole characters; b"" for an id of no token."""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = self._spell(token_id) if token_id < self.vocab_size else b""
        return found

    def is_special(self, token_id: int) -> bool:
        """Whether a token is left out of texts."""
        return token_id in self._special_ids

    def leaves_out(self, text: str) -> bool:
        """Whether a text is one token that answers are without."""
        return text in self._special_texts

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each id as the vocabulary spells it; "" where it has a hole."""
        return [token or "" for token in self._tokenizer.convert_ids_to_tokens(list(token_ids))]

    # --- in an event loop ---------------------------------------------------------------------

    async def encode_chat(
        self, chat: Chat, *, salt: str = "", tenant: str = "", limit: int | None = None
    ) -> array[int]:
        """`chat`, on a thread if it is long or much of it is new. tenant: whose turn it takes there."""
        size = chat.num_chars(RENDER_OFFLOAD_CHARS)
        is_long = size > RENDER_OFFLOAD_CHARS or len(chat.messages) > RENDER_OFFLOAD_MESSAGES
        if self._cache is None or is_long:
            return await self.soon(size, tenant, lambda: self.chat(chat, salt=salt, limit=limit))
        begun = self._cache.begin(self.render(chat), salt)
        return await self.soon(begun.missing_chars, tenant, lambda: self._finish_chat(begun))

    async def encode_text(
        self,
        text: str,
        *,
        param: str = "prompt",
        salt: str = "",
        tenant: str = "",
        add_special_tokens: bool = True,
        limit: int | None = None,
    ) -> array[int]:
        """`text`, on a thread if it is long or much of it is new. tenant: as in `encode_chat`."""
        if self._cache is None or len(text) > RENDER_OFFLOAD_CHARS:
            return await self.soon(
                len(text),
                tenant,
                lambda: self.text(
                    text, param=param, salt=salt, add_special_tokens=add_special_tokens, limit=limit
                ),
            )
        begun = self._cache.begin(text, salt)
        return await self.soon(
            begun.missing_chars, tenant, lambda: self._finish_text(begun, param, add_special_tokens)
        )

    async def encode_ids(
        self,
        token_ids: Sequence[object],
        *,
        param: str = "prompt",
        tenant: str = "",
        vocab_size: int | None = None,
    ) -> array[int]:
        """`ids`, on a thread if they are many. tenant: as in `encode_chat`."""
        return await self.soon(
            len(token_ids) // 8, tenant, lambda: self.ids(token_ids, param=param, vocab_size=vocab_size)
        )

    async def soon(self, size: int, tenant: str, job: Callable[[], T]) -> T:
        """What a job returns or raises, on a thread if it is long. tenant: as in `encode_chat`.

        size: characters that take as long to tokenize.
        """
        if size <= OFFLOAD_CHARS:
            return job()
        return await self._on_thread(tenant, job)

    # --- the parts ----------------------------------------------------------------------------

    def _num_tokens(self, text: str) -> int:
        """Of a text, nothing added; nothing of it is kept."""
        return len(self._tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"])

    async def _on_thread(self, tenant: str, job: Callable[[], T]) -> T:
        """What it returns or raises. Whoever gives up waiting for it gives its place up, too."""
        place = self._threads.submit(tenant, job)
        done = asyncio.wrap_future(place)
        try:
            await asyncio.wait([done], timeout=self._max_wait_s)
        except asyncio.CancelledError:
            done.cancel()
            raise
        # What runs cannot be cancelled, and is waited for. Of no more jobs than there are threads each
        # runs, or is about to.
        if self._threads.num_pending > NUM_THREADS and place.cancel():
            raise PromptsBusy(self._threads.num_pending)
        return await done

    def _finish_chat(self, begun: PartlyTokenized) -> array[int]:
        assert self._cache is not None
        with only_what_renders():  # lone surrogates go through a template, but not through a tokenizer
            ids = self._cache.finish(begun, add_special_tokens=False)
        return self._not_empty(ids, "messages")

    def _finish_text(self, begun: PartlyTokenized, param: str, add_special_tokens: bool = True) -> array[int]:
        assert self._cache is not None
        with _only_unicode(param):
            ids = self._cache.finish(begun, add_special_tokens=add_special_tokens)
        return self._not_empty(ids, param)

    def _packed(self, ids: Any, param: str) -> array[int]:
        return self._not_empty(pack_tokens(ids), param)

    def _not_empty(self, ids: array[int], param: str) -> array[int]:
        if not ids:
            raise InvalidField(param, f"{param!r} must hold at least one token.")
        return ids


def _left_out_of(tokenizer: Any) -> frozenset[int]:
    """The tokens that a decoder leaves out of texts.

    The tokenizers library goes by the mark that each token has; `all_special_ids` has only those with a role,
    such as BOS and EOS, and none of Llama 3's headers.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return frozenset(tokenizer.all_special_ids)
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(token_id for token_id, token in added if token.special)


@contextmanager
def _only_unicode(param: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:  # lone surrogates, which JSON can spell
        raise InvalidField(param, f"{param!r} is not valid Unicode text.") from error


def _load(source: str, revision: str | None) -> Any:
    folder = Path(source) if Path(source).is_dir() else None
    if folder is None and source.startswith(("/", ".", "~")):
        raise ConfigError("tokenizer", source, "no such folder")  # rather than asking the hub for it
    with heap.without_collections():
        from transformers import AutoTokenizer  # seconds; only where a tokenizer is really loaded

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception as error:  # tokenizers raises a bare one for a file that it cannot read
        detail = str(error).strip().splitlines()
        raise ConfigError(
            "tokenizer", source, f"no tokenizer can be loaded from it ({detail[0] if detail else error!r})"
        ) from error
    if (fault := template_fault(tokenizer, folder)) is not None:
        raise ConfigError("tokenizer", source, fault)
    return tokenizer
