"""`/v1/prefixes`: what a conversation begins with, computed before its traffic comes, and held.

    POST    messages (or prompt), copies, seconds ──> held on so many replicas, or refused
    GET     the caller's own; one of them by its id         DELETE    give one back

Whole blocks are held, and only of what requests with more messages have in common with these: not the turn of
the assistant, and nothing that the template writes differently once more follows. Knows bodies, keys' names
and the encoder; knows neither HTTP nor how copies are made.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from cache.block_hash import PackedHashes
from cache.counted import counted
from router.config import RouterConfig
from router.errors import (
    InvalidField,
    NoReplica,
    PrefixLimitReached,
    PrefixNotFound,
    PromptTooLong,
    UnknownModel,
    UnsupportedParameter,
)
from router.limits import Limits
from router.openai_api.checked import checked, to_salt
from router.openai_api.messages import MESSAGES_SCHEMA, ChatMessage, to_messages
from router.openai_api.prompts import TokenPrompt, is_token_id
from router.openai_api.responses import PrefixDeleted, PrefixList, PrefixObject, usage_of
from router.openai_api.template_fields import TemplateFields, check_has_chat
from router.openai_api.tokenization import refuse_other_templates
from router.openai_api.tool_calls import renders_tools
from router.openai_api.tools import Tool, to_tools
from router.prefixes.directory import PrefixDirectory
from router.prefixes.keeper import PrefixKeeper
from router.prefixes.prefix import PinnedPrefix, Prefix
from router.prompts.chat import Chat
from router.prompts.prompt import PromptEncoder
from router.tenants.allowance import Visit
from router.tenants.settings import CacheScope
from router.tenants.tenancy import Tenancy

DEFAULT_SECONDS = 600
# Stands for whatever follows, to see where the template's text for these messages stops being its beginning.
_MORE = {"role": "user", "content": "x"}


def _to_prompt(value: object) -> str | TokenPrompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(map(is_token_id, value)):
        return TokenPrompt.model_construct(token_ids=tuple(value))
    raise InvalidField("prompt", f"'prompt' must be {_TEXTS['prompt']}.")


class PrefixBody(TemplateFields):
    """POST /v1/prefixes"""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[
        tuple[ChatMessage, ...], BeforeValidator(to_messages), WithJsonSchema(MESSAGES_SCHEMA)
    ] = ()
    tools: Annotated[tuple[Tool, ...], BeforeValidator(to_tools), WithJsonSchema({"type": "array"})] = ()
    prompt: Annotated[
        str | TokenPrompt | None,
        BeforeValidator(_to_prompt),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}),
    ] = None
    add_special_tokens: bool | None = None  # to a text, as the completions will say it
    copies: Annotated[int, Field(ge=1)] = 1
    seconds: Annotated[int, Field(ge=1)] = DEFAULT_SECONDS
    cache_salt: Annotated[str, BeforeValidator(to_salt), Field(min_length=1)] | None = None


_TEXTS = {
    "model": "the name of a model this server has",
    "prompt": "a string or a list of token ids",
    "copies": "an integer of at least 1, and at most the number of replicas",
    "seconds": "an integer of at least 1",
    "add_special_tokens": "true or false",
    "cache_salt": "a non-empty string",
}


def parse_prefix(body: Mapping[str, Any], limits: Limits) -> PrefixBody:
    """Raises InvalidField or UnsupportedParameter, naming the field; null counts as absent."""
    refuse_other_templates(body)
    parsed = checked(PrefixBody, body, limits, _TEXTS)
    if (parsed.prompt is None) is not bool(parsed.messages):
        raise InvalidField("messages", "Either 'messages' or 'prompt' is required, and not both.")
    check_has_chat(body, bool(parsed.messages))
    if parsed.messages and parsed.add_special_tokens:  # as a chat that asks for it
        raise UnsupportedParameter("add_special_tokens")
    if parsed.seconds > limits.max_prefix_seconds:
        raise InvalidField("seconds", f"'seconds' must be at most {limits.max_prefix_seconds}.")
    if parsed.copies > limits.max_prefix_copies:
        raise InvalidField("copies", f"'copies' must be at most {limits.max_prefix_copies}.")
    return parsed


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The routes' work. Stateless beside its parts."""

    config: RouterConfig
    encoder: PromptEncoder
    tenancy: Tenancy
    keeper: PrefixKeeper
    directory: PrefixDirectory
    hashes: Callable[[array[int], str], Awaitable[PackedHashes]]  # of token ids under a salt
    replica_limits: Callable[[], tuple[int, int | None]]  # how many there are, and what prompts fit them all
    vocab_size: Callable[[], int]  # token ids that all of them have

    async def create(self, body: PrefixBody, request_id: str, visit: Visit) -> PrefixObject:
        """Raises ApiError, a RoutingError or a RequestRefused; then nothing is held."""
        self._check(body)
        salt = self.tenancy.salts.salt(visit.tenant, body.cache_salt)
        token_ids = await self._tokens(body, salt, visit.tenant)
        prefix = await self._whole_blocks(body, token_ids, salt)
        owner = visit.key.owner
        self._check_limits(prefix, body.copies, await self.directory.pins(owner), visit)
        num_tokens = len(prefix.token_ids)
        visit.charge(1, num_tokens * body.copies)
        try:
            pin, cached_tokens = await self.keeper.establish(
                prefix, owner=owner, copies=body.copies, seconds=body.seconds, request_id=request_id
            )
        except PrefixNotFound:  # its own key's doing, with replicas at work on it, as if it had hung up
            raise
        except Exception:
            visit.refund()
            raise
        usage = usage_of(num_tokens * body.copies, 0, cached_tokens)
        return self._shown(pin).model_copy(update={"usage": usage, "prompt_tokens": len(token_ids)})

    async def listed(self, visit: Visit) -> PrefixList:
        pins = await self.directory.pins(visit.key.owner)
        return PrefixList(object="list", data=[self._shown(pin) for pin in pins])

    async def one(self, pin_id: str, visit: Visit) -> PrefixObject:
        """Raises PrefixNotFound or RouterUnheard."""
        return self._shown(await self.directory.find(pin_id, visit.key.owner))

    async def delete(self, pin_id: str, visit: Visit) -> PrefixDeleted:
        """Its blocks are free when this returns. Raises PrefixNotFound or RouterUnheard."""
        pin = await self.directory.find(pin_id, visit.key.owner)
        await self.directory.give_back(pin)
        return PrefixDeleted(id=pin.pin_id, object="prefix.deleted", deleted=True)

    # --- parts of these -----------------------------------------------------------------------

    def _check(self, body: PrefixBody) -> None:
        if body.model != self.config.model_name:
            raise UnknownModel(body.model, [self.config.model_name])
        if self.tenancy.salts.scope is CacheScope.REQUEST and body.cache_salt is None:
            raise InvalidField(
                "cache_salt",
                "'cache_salt' is required here: without it no other request finds the prefix.",
            )
        if body.tools and not renders_tools(self.encoder.chat_template(has_tools=True)):
            raise UnsupportedParameter(
                "tools", "'tools' is not supported: this model's chat template has no place for them."
            )
        num_replicas, _ = self.replica_limits()
        if not num_replicas:
            raise NoReplica()
        if body.copies > num_replicas:
            raise InvalidField("copies", f"'copies' must be at most {num_replicas}, the number of replicas.")

    async def _tokens(self, body: PrefixBody, salt: str, tenant: str) -> array[int]:
        """What every longer prompt that begins so begins with, as far as can be told."""
        _, limit = self.replica_limits()
        match body.prompt:
            case str(text):
                return await self.encoder.encode_text(
                    text,
                    salt=salt,
                    tenant=tenant,
                    add_special_tokens=body.add_special_tokens is not False,
                    limit=limit,
                )
            case TokenPrompt(token_ids=token_ids):
                return await self.encoder.encode_ids(token_ids, tenant=tenant, vocab_size=self.vocab_size())
        messages = [message.for_template() for message in body.messages]
        is_users = messages[-1]["role"] == "user"  # then the assistant speaks next
        longer = messages if is_users else [*messages, _MORE]
        tools = [tool.for_template() for tool in body.tools]
        variables = body.template_variables(self.encoder, has_tools=bool(tools))
        alone = await self.encoder.encode_chat(
            Chat(messages, tools, variables, assistant_is_next=False), salt=salt, tenant=tenant, limit=limit
        )
        try:
            followed = await self.encoder.encode_chat(
                Chat(longer, tools, variables), salt=salt, tenant=tenant
            )
        except InvalidField:
            return alone  # the template wants something else next
        return alone[: _num_common(alone, followed)]

    async def _whole_blocks(self, body: PrefixBody, token_ids: array[int], salt: str) -> Prefix:
        size, param = self.config.fingerprint.block_size, "messages" if body.messages else "prompt"
        whole = token_ids[: len(token_ids) // size * size]
        if not whole:
            raise InvalidField(
                param,
                f"'{param}' has {counted(len(token_ids), 'token')} that longer prompts would share; whole "
                f"blocks of {size} are held.",
            )
        self.encoder.check_known(whole, self.vocab_size(), param=param)
        _, limit = self.replica_limits()
        if limit is not None and len(whole) + 1 > limit:
            raise PromptTooLong(len(whole), 1, limit, param=param)
        return Prefix(whole, await self.hashes(whole, salt), salt)

    def _check_limits(self, prefix: Prefix, copies: int, pins: Sequence[PinnedPrefix], visit: Visit) -> None:
        """pins: the key's, wherever they came through. Raises PrefixLimitReached if they leave too little."""
        size, limits, own = self.config.fingerprint.block_size, self.config.limits, visit.key.limits
        held = sum(pin.num_blocks * pin.copies for pin in pins) * size
        for what, needed, taken, limit in (
            ("prefixes", 1, len(pins), limits.max_prefixes if own.prefixes is None else own.prefixes),
            (
                "tokens",
                len(prefix.token_ids) * copies,
                held,
                limits.max_prefix_tokens if own.prefix_tokens is None else own.prefix_tokens,
            ),
        ):
            if taken + needed > limit:
                raise PrefixLimitReached(what, needed, max(0, limit - taken), limit)

    def _shown(self, pin: PinnedPrefix) -> PrefixObject:
        return PrefixObject(
            id=pin.pin_id,
            object="prefix",
            created=int(pin.created_at),
            model=self.config.model_name,
            status="held" if pin.is_whole else "partial",
            blocks=pin.num_blocks,
            tokens=pin.num_blocks * self.config.fingerprint.block_size,
            copies=pin.copies,
            replicas=list(pin.replicas),
            expires_at=int(pin.expires_at),
        )


def _num_common(first: array[int], second: array[int]) -> int:
    """Leading ids that both have."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
