"""From what a client sent to the token ids the engine will see: chat, text or ids.

One path for all: what comes out is exactly what transformers' `apply_chat_template(messages,
add_generation_prompt=True)` and `tokenizer(text)` give, so the router's block hashes are the engine's.
A chat's template writes its own special tokens, a text gets the tokenizer's default ones; never both.
Tokenizers load without remote code and without torch, which this process never needs (`hide_torch`).

Knows tokenizers and templates; knows neither HTTP, blocks nor replicas.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2

from cache.errors import ConfigError
from cache.fingerprint import ChatTemplate, template_digest
from cache.types import pack_tokens
from router.errors import InvalidField, NoChatTemplate

Message = Mapping[str, Any]

OFFLOAD_CHARS = 4096  # a longer prompt takes milliseconds: it is encoded on a thread, not in the event loop
_WORKERS = 2  # tokenizers release the GIL while they encode


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
        import transformers.utils  # noqa: F401
    finally:
        del sys.modules["torch"]


def chat_template_of(source: str, revision: str | None = None) -> ChatTemplate:
    """The chat template of the tokenizer in a folder or hub repository; None if it has none.

    Raises ConfigError when there is no tokenizer to load.
    """
    template: ChatTemplate = _load(source, revision).chat_template
    return template


class PromptEncoder:
    """Encodes prompts with one tokenizer. Safe to call from several threads.

    The plain methods work where they are called; the `encode_*` ones are for an event loop and move
    long prompts to a thread. `close` when done.
    """

    def __init__(self, tokenizer: Any, *, name: str) -> None:
        """tokenizer: a transformers tokenizer; name: for error messages. Prefer `load`."""
        self._tokenizer = tokenizer
        self._name = name
        self._template: ChatTemplate = tokenizer.chat_template
        self.template_digest = template_digest(self._template)
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1  # ids may have holes: the largest counts
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) | frozenset(
            tokenizer.special_tokens_map
        )
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="prompt")
        # A first call settles truncation and padding inside the tokenizer; after it calls only read, and
        # may overlap ("Already borrowed" otherwise).
        tokenizer("", verbose=False)

    @classmethod
    def load(cls, source: str, revision: str | None = None, *, name: str | None = None) -> PromptEncoder:
        """The tokenizer of a local folder or hub repository. Blocks for seconds. Raises ConfigError.

        name: what clients call the model, for error messages: a folder's path is not their business.
        """
        return cls(_load(source, revision), name=name or source)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template)

    def close(self) -> None:
        """Stop the threads; prompts on them finish. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- where they are called ----------------------------------------------------------------

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> array[int]:
        """Token ids of a chat, up to where the assistant speaks.

        Content given as a list of text parts counts as their concatenation.
        Raises NoChatTemplate, or InvalidField when the template refuses the messages.
        """
        if not self._template:
            raise NoChatTemplate(self._name)
        self._check_template_kwargs(template_kwargs or {})
        try:
            ids = self._tokenizer.apply_chat_template(
                [_flattened(message, index) for index, message in enumerate(messages)],
                tools=list(tools) if tools else None,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                tokenizer_kwargs={"verbose": False},
                **(template_kwargs or {}),
            )
        except jinja2.TemplateError as error:  # the template's own words, such as "roles must alternate"
            raise InvalidField("messages", f"The chat template refuses these messages: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            # The template is code over the client's messages: what it chokes on is theirs to change. The
            # error's text may quote them, and error messages never do.
            raise InvalidField(
                "messages", f"The chat template cannot render these messages ({type(error).__name__})."
            ) from error
        return self._packed(ids, "messages")

    def text(self, text: str, *, param: str = "prompt") -> array[int]:
        """Token ids of a text, with the special tokens its tokenizer adds by default."""
        try:
            ids = self._tokenizer(text, verbose=False)["input_ids"]
        except (TypeError, ValueError) as error:  # lone surrogates, which JSON can spell
            raise InvalidField(param, f"{param!r} is not valid Unicode text.") from error
        return self._packed(ids, param)

    def ids(self, token_ids: Sequence[object], *, param: str = "prompt") -> array[int]:
        """Token ids given as such, checked against the vocabulary. Raises InvalidField."""
        for index, token_id in enumerate(token_ids):
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                raise InvalidField(
                    f"{param}[{index}]",
                    f"'{param}[{index}]' must be a token id from 0 to {self.vocab_size - 1}.",
                )
        return self._packed(token_ids, param)

    # --- in an event loop ---------------------------------------------------------------------

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> array[int]:
        """`chat`, on a thread if it is long."""
        size = sum(_content_size(message) for message in messages) + 64 * len(messages)
        size += len(json.dumps(tools, default=str)) if tools else 0
        return await self._run(
            size, lambda: self.chat(messages, tools=tools, template_kwargs=template_kwargs)
        )

    async def encode_text(self, text: str, *, param: str = "prompt") -> array[int]:
        """`text`, on a thread if it is long."""
        return await self._run(len(text), lambda: self.text(text, param=param))

    async def encode_ids(self, token_ids: Sequence[object], *, param: str = "prompt") -> array[int]:
        """`ids`, on a thread if they are many."""
        return await self._run(len(token_ids) // 8, lambda: self.ids(token_ids, param=param))

    # --- the parts ----------------------------------------------------------------------------

    async def _run(self, size: int, encode: Callable[[], array[int]]) -> array[int]:
        if size <= OFFLOAD_CHARS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._pool, encode)

    def _packed(self, ids: Any, param: str) -> array[int]:
        if not ids:
            raise InvalidField(param, f"{param!r} must hold at least one token.")
        return pack_tokens(ids)

    def _check_template_kwargs(self, template_kwargs: Mapping[str, Any]) -> None:
        """Only the template's own variables: not another template, nor how to tokenize."""
        for key in template_kwargs:
            if key in self._reserved or key in ("messages", "self", "kwargs"):
                raise InvalidField(
                    f"chat_template_kwargs.{key}", f"'chat_template_kwargs.{key}' cannot be set."
                )


def _load(source: str, revision: str | None) -> Any:
    if source.startswith(("/", ".", "~")) and not Path(source).is_dir():
        raise ConfigError("tokenizer", source, "no such folder")  # rather than asking the hub for it
    from transformers import AutoTokenizer  # seconds; only where a tokenizer is really loaded

    try:
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        detail = str(error).strip().splitlines()
        raise ConfigError(
            "tokenizer", source, f"no tokenizer can be loaded from it ({detail[0] if detail else error!r})"
        ) from error


def _flattened(message: Message, index: int) -> dict[str, Any]:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    at = f"messages[{index}].content"
    if not isinstance(content, Sequence):
        raise InvalidField(at, f"{at!r} must be a string or a list of text parts.")
    texts = []
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidField(f"{at}[{number}]", f"'{at}[{number}]' must be a text part.")
        texts.append(text)
    return {**message, "content": "".join(texts)}


def _content_size(message: Message) -> int:
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        return sum(len(str(part)) for part in content)
    return len(content) if isinstance(content, str) else 0
