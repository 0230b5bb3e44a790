"""`POST /tokenize` and `/detokenize`: the ids that would be hashed and sent to a replica, and their text.

The two bodies and answers are vLLM's, so that routers and tools made for it count as this server does. Knows
the encoder and the bodies; knows neither HTTP nor replicas.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import to_json

from router.errors import InvalidField, UnknownModel, UnsupportedParameter
from router.limits import Limits
from router.openai_api.checked import checked, to_salt
from router.openai_api.fields import num_beyond
from router.openai_api.messages import MESSAGES_SCHEMA, ChatMessage, to_messages
from router.openai_api.prompts import is_token_id
from router.openai_api.responses import DetokenizeResponse
from router.openai_api.template_fields import TemplateFields, check_has_chat
from router.openai_api.tool_calls import renders_tools
from router.openai_api.tools import TOOLS_SCHEMA, Tool, to_tools
from router.prompts.chat import Chat
from router.prompts.prompt import PromptEncoder


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    model: Annotated[str, Field(min_length=1)] | None = None  # absent: the one that is served


class TokenizeBody(_Body, TemplateFields):
    """A text, or a chat as its template renders it."""

    prompt: str | None = None
    messages: Annotated[
        tuple[ChatMessage, ...], BeforeValidator(to_messages), WithJsonSchema(MESSAGES_SCHEMA)
    ] = ()
    tools: Annotated[tuple[Tool, ...], BeforeValidator(to_tools), WithJsonSchema(TOOLS_SCHEMA)] = ()
    add_special_tokens: bool | None = None  # to a text, unless it says no; a chat's template writes its own
    add_generation_prompt: bool = True  # of a chat: what would be sent to the model ends in it
    return_token_strs: bool = False
    cache_salt: Annotated[str, BeforeValidator(to_salt)] = ""  # as a generating request would send it


class DetokenizeBody(_Body):
    tokens: list[int]


_TEXTS = {
    "model": "the name of a model this server has",
    "prompt": "a string",
    "tokens": "a list of token ids",
    "cache_salt": "a string",
    "add_special_tokens": "true or false",
    "add_generation_prompt": "true or false",
    "return_token_strs": "true or false",
}


_PART = 4096  # ids that are written in one call


@dataclass(frozen=True, slots=True)
class Tokenization:
    """Both routes. Stateless."""

    model_name: str
    encoder: PromptEncoder
    limits: Limits

    async def tokenize(self, body: TokenizeBody, max_model_len: int | None, salt: str, tenant: str) -> bytes:
        """The answer, as JSON. Raises ApiError.

        salt: what was tokenized before is looked up under it. tenant: who asks.
        """
        self._check_model(body)
        token_ids = await self._encode(body, salt, tenant)
        return await self.encoder.soon(
            len(token_ids), tenant, lambda: self._written(token_ids, max_model_len, body.return_token_strs)
        )

    async def detokenize(self, body: DetokenizeBody, tenant: str) -> DetokenizeResponse:
        """tenant: who asks. Raises ApiError."""
        self._check_model(body)
        tokens = body.tokens
        return DetokenizeResponse(
            prompt=await self.encoder.soon(len(tokens), tenant, lambda: self._text(tokens))
        )

    def _written(self, token_ids: array[int], max_model_len: int | None, has_strings: bool) -> bytes:
        """Part by part: millions of ids in one call let no other thread run meanwhile."""
        cut = [token_ids[begin : begin + _PART] for begin in range(0, len(token_ids), _PART)]
        ids = _joined(part.tolist() for part in cut)
        strings = _joined(map(self.encoder.token_strings, cut)) if has_strings else b"null"
        length = to_json(max_model_len)
        return b'{"count":%d,"max_model_len":%s,"tokens":%s,"token_strs":%s}' % (
            len(token_ids),
            length,
            ids,
            strings,
        )

    def _text(self, tokens: list[int]) -> str:
        for index, token_id in enumerate(tokens):
            if not is_token_id(token_id) or token_id >= self.encoder.vocab_size:
                at = f"tokens[{index}]"
                raise InvalidField(at, f"'{at}' must be a token id from 0 to {self.encoder.vocab_size - 1}.")
        return self.encoder.decode(tokens)

    async def _encode(self, body: TokenizeBody, salt: str, tenant: str) -> array[int]:
        if (body.prompt is None) is not bool(body.messages):
            raise InvalidField("prompt", "Either 'prompt' or 'messages' is required, and not both.")
        if body.prompt is not None:
            return await self.encoder.encode_text(
                body.prompt,
                salt=salt,
                tenant=tenant,
                add_special_tokens=body.add_special_tokens is not False,
            )
        if body.tools and not renders_tools(self.encoder.chat_template(has_tools=True)):
            raise UnsupportedParameter(
                "tools", "'tools' is not supported: this model's chat template has no place for them."
            )
        messages = [message.for_template() for message in body.messages]
        tools = [tool.for_template() for tool in body.tools]
        variables = body.template_variables(self.encoder, has_tools=bool(tools))
        chat = Chat(messages, tools, variables, assistant_is_next=body.add_generation_prompt)
        return await self.encoder.encode_chat(chat, salt=salt, tenant=tenant)

    def _check_model(self, body: _Body) -> None:
        if body.model is not None and body.model != self.model_name:
            raise UnknownModel(body.model, [self.model_name])


def _joined(parts: Iterable[list[Any]]) -> bytes:
    """One list of JSON."""
    return b"[%s]" % b",".join(to_json(part)[1:-1] for part in parts)


def parse_tokenize(body: Mapping[str, Any], limits: Limits) -> TokenizeBody:
    """Raises InvalidField or UnsupportedParameter, naming the field; null counts as absent."""
    refuse_other_templates(body)
    parsed = checked(TokenizeBody, body, limits, _TEXTS)
    check_has_chat(body, bool(parsed.messages))
    if parsed.messages and parsed.add_special_tokens:  # as a chat that asks for it
        raise UnsupportedParameter("add_special_tokens")
    return parsed


def refuse_other_templates(body: Mapping[str, Any]) -> None:
    """Raises UnsupportedParameter for what would render a chat otherwise than this server does."""
    for name in ("chat_template", "continue_final_message", "mm_processor_kwargs"):
        if body.get(name):
            raise UnsupportedParameter(name)


def parse_detokenize(body: Mapping[str, Any], limits: Limits) -> DetokenizeBody:
    """Raises InvalidField, naming the field; null counts as absent."""
    return checked(DetokenizeBody, body, limits, _TEXTS)


def unknown_fields(kind: type[BaseModel], body: Mapping[str, Any]) -> int:
    """How many of a body's fields its endpoint does not know."""
    return num_beyond(body, kind.model_fields)
