"""A tokenizer's chat templates: which one renders a chat, and the text that it makes.

Knows transformers' rendering; knows neither tokens, caches nor requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jinja2

from cache.fingerprint import ChatTemplate, template_digest
from router.errors import InvalidField, NoChatTemplate
from router.prompts.chat import Chat
from router.prompts.past_calls import A_TOOL, PastCalls

# What transformers hands on to every template under these names, beside its method's parameters.
_TEMPLATES_OWN = ("messages", "conversations", "self", "kwargs")


class ChatTemplates:
    """Of one tokenizer. Safe to call from several threads."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        """tokenizer: a transformers tokenizer; name: for error messages."""
        self._tokenizer = tokenizer
        self._name = name
        self._templates: ChatTemplate = tokenizer.chat_template
        self.digest = template_digest(self._templates)
        self._renders_itself = _has_own_templating(tokenizer)
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) | frozenset(
            tokenizer.special_tokens_map
        )
        self._past_calls: dict[bool, PastCalls] = {}  # of chats with tools, and without

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._templates)

    def of(self, *, has_tools: bool) -> str | None:
        """The template that renders a chat: of several, the one for tools if there are some."""
        if self._templates is None or isinstance(self._templates, str):
            return self._templates
        default = self._templates.get("default")
        return self._templates.get("tool_use", default) if has_tools else default

    def apply(self, chat: Chat, *, tokenize: bool) -> Any:
        """The chat's text, or its token ids.

        Raises NoChatTemplate, or InvalidField when the template refuses the messages.
        """
        if not self.of(has_tools=bool(chat.tools)):
            raise NoChatTemplate(self._name)
        self._check_variables(chat.template_kwargs)
        messages = chat.flattened()
        if any(message.get("tool_calls") for message in messages):
            messages = self._past(has_tools=bool(chat.tools)).put_into(messages)
        with only_what_renders():
            return self._rendered(
                messages,
                chat.tools,
                chat.template_kwargs,
                assistant_is_next=chat.assistant_is_next,
                tokenize=tokenize,
            )

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        *,
        assistant_is_next: bool = True,
        tokenize: bool = False,
    ) -> Any:
        """Raises whatever the template does."""
        known_tools = list(tools) if tools else None
        if self._renders_itself:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=known_tools,
                add_generation_prompt=assistant_is_next,
                tokenize=tokenize,
                return_dict=False,
                tokenizer_kwargs={"verbose": False},
                **variables,
            )
        from transformers.utils.chat_template_utils import render_jinja_template

        # As `apply_chat_template` has it, which takes out what is null before.
        (text,), _ = render_jinja_template(
            conversations=[messages],
            tools=known_tools,
            chat_template=self.of(has_tools=bool(tools)),
            add_generation_prompt=assistant_is_next,
            **{**self._tokenizer.special_tokens_map, **variables},
        )
        if not tokenize:
            return text
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _past(self, *, has_tools: bool) -> PastCalls:
        """What the template is handed in messages that call tools."""
        found = self._past_calls.get(has_tools)
        if found is None:
            tools = [A_TOOL] if has_tools else None
            found = PastCalls.tried(lambda messages: self._rendered(messages, tools, {}))
            self._past_calls[has_tools] = found
        return found

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        """Only the template's own: not another template, nor how to tokenize."""
        for key in variables:
            if key in self._reserved or key in _TEMPLATES_OWN:
                raise InvalidField(
                    f"chat_template_kwargs.{key}", f"'chat_template_kwargs.{key}' cannot be set."
                )


@contextmanager
def only_what_renders() -> Iterator[None]:
    """The template is code over the client's messages: what it chokes on is theirs to change."""
    try:
        yield
    except jinja2.TemplateError as error:  # the template's own words, such as "roles must alternate"
        raise InvalidField("messages", f"The chat template refuses these messages: {error}") from error
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        # The error's text may quote the messages, and error messages never do.
        raise InvalidField(
            "messages", f"The chat template cannot render these messages ({type(error).__name__})."
        ) from error


def _has_own_templating(tokenizer: Any) -> bool:
    """Whether it renders chats in a way of its own, as Mistral's do."""
    from transformers import PreTrainedTokenizerBase

    own = getattr(type(tokenizer), "apply_chat_template", None)
    return own is not PreTrainedTokenizerBase.apply_chat_template
