"""From a checked request body to generations, and from those to an answer.

Checks what needs the tokenizer or the fleet (model name, token ids, context length), turns prompts into
jobs and hands them to the dispatcher. Knows neither HTTP nor Ray.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import TypeVar

from cache.block_hash import BlockHasher, PackedHashes
from cache.messages import SamplingParams
from cache.tracing import Tracing
from cache.types import RequestId
from router.config import RouterConfig
from router.dashboard.view import Dashboard
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.job import Job
from router.errors import InvalidField, NoReplica, PromptTooLong, UnknownModel, UnsupportedParameter
from router.fleet.gather import FleetMetrics
from router.insight.insight import Insight
from router.metrics import DecisionPart, RouterMetrics
from router.openai_api.about import About, Readiness
from router.openai_api.answer import Answer, choices_of, is_deadline_clients
from router.openai_api.answer_form import AnswerForm, AnswerForms
from router.openai_api.asked import Asked
from router.openai_api.codec import ChatCodec, Choice, Codec, CompletionCodec, Head
from router.openai_api.fields import Endpoint
from router.openai_api.logprobs import (
    ChatLogprobRecord,
    CompletionLogprobRecord,
    LogprobRecord,
    NoLogprobs,
)
from router.openai_api.prefixes import Prefixes
from router.openai_api.prompt_text import ChatText, PlainText, SaltedText
from router.openai_api.prompts import Prompt, TextPrompt, TokenPrompt
from router.openai_api.responses import DetokenizeResponse
from router.openai_api.schema import ChatBody, CompletionBody, RequestBody
from router.openai_api.structure_check import StructureChecker
from router.openai_api.tokenization import DetokenizeBody, Tokenization, TokenizeBody
from router.placement.routing import Routing
from router.policies import NAMES as POLICY_NAMES
from router.policies import PromptView
from router.prefixes.directory import PrefixDirectory
from router.prefixes.keeper import PrefixKeeper
from router.prompts.chain_cache import ChainCache, ChainStatistics, room_for
from router.prompts.chat import Chat
from router.prompts.prompt import PromptEncoder
from router.tenants.allowance import OPEN_VISIT, Visit
from router.tenants.tenancy import Tenancy

T = TypeVar("T")

# Hashing costs up to 0.1 us per token, a fiftieth of that where it is quick: longer prompts than this would
# stall other streams.
_HASH_OFFLOAD_TOKENS, _QUICK_OFFLOAD_TOKENS = 8192, 131_072

# Of the span that the present task's request is answered under; "" while nobody traces.
TRACEPARENT: ContextVar[str] = ContextVar("warmpath traceparent", default="")


class Service:
    """The endpoints: both that generate, and those about tokens and prefixes."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        encoder: PromptEncoder,
        hasher: BlockHasher,
        routing: Routing,
        dispatcher: Dispatcher,
        insight: Insight,
        metrics: RouterMetrics,
        fleet: FleetMetrics,
        tracing: Tracing,
        tenancy: Tenancy,
        prefixes: PrefixKeeper,
        directory: PrefixDirectory,
        readiness: Callable[[], Readiness],
        version: str,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.config = config
        self.insight = insight
        self.metrics = metrics
        self.fleet = fleet
        self.tracing = tracing
        self.tenancy = tenancy
        self.readiness = readiness
        self.clock = clock
        self._encoder = encoder
        self._tokenization = Tokenization(config.model_name, encoder, config.limits)
        self._hasher = hasher
        self._chains = ChainCache(hasher, room_for(hasher))
        self._hash_offload_tokens = _QUICK_OFFLOAD_TOKENS if hasher.is_quick else _HASH_OFFLOAD_TOKENS
        limits = config.limits
        checker = StructureChecker(limits.max_compile_seconds, limits.max_pending_structures)
        self.forms = AnswerForms(encoder, checker, limits, separates_reasoning=config.separate_reasoning)
        self._routing = routing
        self._dispatcher = dispatcher
        self.about = About(config, encoder, routing, version, int(wall_clock()))
        self._wall_clock = wall_clock
        self._rng = rng
        self._directory = directory
        self.prefixes = Prefixes(
            config,
            encoder,
            tenancy,
            prefixes,
            directory,
            hashes=self._hash,
            replica_limits=lambda: (len(routing.replicas), self.max_model_len()),
            vocab_size=self.about.vocab_size,
        )

    # --- generating ---------------------------------------------------------------------------

    async def chat(self, body: ChatBody, asked: Asked) -> Answer:
        """Raises ApiError for what is wrong with the request, NoReplica if its length cannot be judged."""
        self._check(body, asked.policy)
        tenant = asked.visit.tenant
        form = await self.forms.of_chat(body, tenant)
        messages = [message.for_template() for message in body.messages]
        tools = [tool.for_template() for tool in body.tools]
        salt = self.tenancy.salts.salt(tenant, body.cache_salt)
        variables = body.template_variables(self._encoder, has_tools=bool(tools))
        chat = Chat(messages, tools, variables)
        prompt = await self._timed(
            self._encoder.encode_chat(chat, salt=salt, tenant=tenant, limit=self.max_model_len())
        )
        text = ChatText(body.messages, asked.session or body.prompt_cache_key)
        job = await self._job(body, form, prompt, text, salt, asked, self._unique(asked), "messages")
        new_reader = self.forms.readers(form, prompt)
        codec = ChatCodec(Head(f"chatcmpl-{job.request_id}", int(self._wall_clock()), body.model))
        return self._answer(
            Endpoint.CHAT,
            body,
            codec,
            [job],
            asked,
            lambda _index: Choice(
                prompt_tokens=len(prompt),
                reader=new_reader(),
                logprobs=ChatLogprobRecord(self._encoder.token_bytes) if body.logprobs else NoLogprobs(),
            ),
        )

    async def complete(self, body: CompletionBody, asked: Asked) -> Answer:
        """Raises what `chat` raises. Prompts of one body are requests of their own, numbered in order."""
        self._check(body, asked.policy)
        tenant, unique = asked.visit.tenant, self._unique(asked)
        form = await self.forms.of_completion(body, tenant)
        session_hint = asked.session or body.prompt_cache_key
        salt = self.tenancy.salts.salt(tenant, body.cache_salt)
        jobs, echoes = [], []
        for index, prompt in enumerate(body.prompt):
            await asyncio.sleep(0)  # each may take milliseconds: others run in between
            param = f"prompt[{index}]" if len(body.prompt) > 1 else "prompt"
            token_ids = await self._encode(prompt, param, salt, tenant, body.add_special_tokens)
            job_id = RequestId(f"{unique}-{index}") if index else unique
            text = PlainText(prompt.text if isinstance(prompt, TextPrompt) else "", session_hint)
            jobs.append(await self._job(body, form, token_ids, text, salt, asked, job_id, param))
            echoes.append(await self._echo(prompt, token_ids) if body.echo else "")
        codec = CompletionCodec(Head(f"cmpl-{unique}", int(self._wall_clock()), body.model))
        return self._answer(
            Endpoint.COMPLETIONS,
            body,
            codec,
            jobs,
            asked,
            lambda index: Choice(
                prompt_tokens=len(jobs[index].prompt),
                logprobs=self._completion_logprobs(body, jobs[index].prompt, echoes[index]),
                echo=echoes[index],
                tells_output=body.tells_output,
            ),
        )

    async def _echo(self, prompt: Prompt, token_ids: array[int]) -> str:
        """The prompt as its answer repeats it: what was sent, or the text of the tokens that were."""
        if isinstance(prompt, TextPrompt):
            return prompt.text
        return await asyncio.to_thread(self._encoder.decode_text, token_ids)

    def _completion_logprobs(self, body: CompletionBody, prompt: array[int], echo: str) -> LogprobRecord:
        if body.logprobs is None:
            return NoLogprobs()
        return CompletionLogprobRecord(
            self._encoder.token_bytes,
            self._encoder.is_special,
            prompt=prompt if body.echo else (),
            prompt_text=echo,
            tells_output=body.tells_output,
        )

    def _answer(
        self,
        endpoint: Endpoint,
        body: RequestBody,
        codec: Codec,
        jobs: Sequence[Job],
        asked: Asked,
        begin: Callable[[int], Choice],
    ) -> Answer:
        """begin: a new choice of the job at this index. Raises what `Visit.charge` raises."""
        asked.visit.charge(len(jobs), sum(len(job.prompt) for job in jobs))
        first_token_s = self.metrics.first_token_s.labels(endpoint.value)
        return Answer(
            endpoint,
            body,
            codec,
            choices=[choice for index in range(len(jobs)) for choice in choices_of(body.n, index, begin)],
            generations=[self._dispatcher.start(job) for job in jobs],
            on_first_token=lambda: first_token_s.observe(self.clock() - asked.arrived_at),
            visit=asked.visit,
            is_deadline_clients=is_deadline_clients(jobs[0].timeout_s, self.config.request_timeout_s),
        )

    # --- what needs the tokenizer or the fleet ------------------------------------------------

    def _check(self, body: RequestBody, policy: str | None) -> None:
        config, vocab_size = self.config, self.about.vocab_size()
        if body.model != config.model_name:
            raise UnknownModel(body.model, [config.model_name])
        if policy is not None and policy not in POLICY_NAMES:
            raise InvalidField(
                "x-warmpath-policy", f"'x-warmpath-policy' must be one of {', '.join(POLICY_NAMES)}."
            )
        if any(token_id >= vocab_size for token_id in body.stop_token_ids):
            raise InvalidField(
                "stop_token_ids", f"'stop_token_ids' must have ids between 0 and {vocab_size - 1}."
            )
        if any(token_id >= vocab_size for token_id, _ in body.logit_bias):
            raise InvalidField("logit_bias", f"'logit_bias' must have ids between 0 and {vocab_size - 1}.")
        asked, replicas = body.asked_of_logits(), self._routing.replicas.values()
        if asked is not None and replicas and not any(info.has_logits for info in replicas):
            raise UnsupportedParameter(
                asked, f"'{asked}' is not supported: this server simulates its model and has no logits."
            )

    async def _encode(
        self, prompt: Prompt, param: str, salt: str, tenant: str, add_special_tokens: bool
    ) -> array[int]:
        if isinstance(prompt, TokenPrompt):
            return await self._encoder.encode_ids(
                prompt.token_ids, param=param, tenant=tenant, vocab_size=self.about.vocab_size()
            )
        return await self._timed(
            self._encoder.encode_text(
                prompt.text,
                param=param,
                salt=salt,
                tenant=tenant,
                add_special_tokens=add_special_tokens,
                limit=self.max_model_len(),
            )
        )

    async def _timed(self, tokenization: Awaitable[array[int]]) -> array[int]:
        began_at, span = self.clock(), self.tracing.begin("tokenize", TRACEPARENT.get())
        try:
            token_ids = await tokenization
            span.tell({"prompt_tokens": len(token_ids)})
            return token_ids
        finally:
            span.end()
            self.metrics.decision_s[DecisionPart.TOKENIZE].add(self.clock() - began_at)

    async def _job(
        self,
        body: ChatBody | CompletionBody,
        form: AnswerForm,
        prompt: array[int],
        text: PromptView,
        salt: str,
        asked: Asked,
        request_id: RequestId,
        param: str,
    ) -> Job:
        self._encoder.check_known(prompt, self.about.vocab_size(), param=param)
        started_at, visit = self.clock(), asked.visit
        max_tokens = self._max_tokens(len(prompt), body.token_limit, param)
        if body.min_tokens > max_tokens:
            raise InvalidField("min_tokens", _beyond_max_tokens(body, max_tokens))
        hashes = await self._hash(prompt, salt)
        self.metrics.decision_s[DecisionPart.HASH].add(self.clock() - started_at)
        return Job(
            request_id=request_id,
            prompt=prompt,
            block_hashes=hashes,
            sampling=SamplingParams(
                max_tokens=max_tokens,
                min_tokens=body.min_tokens,
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=max(body.top_k, 0),
                stop=body.stop,
                stop_token_ids=body.stop_token_ids,
                ignore_eos=body.ignore_eos,
                min_p=body.min_p,
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
                repetition_penalty=body.repetition_penalty,
                logit_bias=body.logit_bias,
                logprobs=body.num_logprobs,
                prompt_logprobs=body.num_prompt_logprobs,
                skip_special_tokens=form.skips_special_tokens,
            ),
            n=body.n,
            # Drawn here if not given, so that any replica can continue the stream.
            seed=body.seed if body.seed is not None else self._rng.getrandbits(63),
            cache_salt=salt,
            tenant=visit.tenant,
            share=visit.key.share,
            priority=visit.priority(body.priority),
            part=1.0 / len(body.prompt) if isinstance(body, CompletionBody) else 1.0,
            admittance=asked.admittance,
            timeout_s=asked.timeout_s,
            came_at=asked.arrived_at,
            policy=asked.policy,
            text=SaltedText(text, salt) if salt else text,
            session=asked.session,
            traceparent=TRACEPARENT.get(),
            structure=form.structure,
            spend=visit.spend,
        )

    async def _hash(self, prompt: array[int], salt: str) -> PackedHashes:
        chain = self._chains.begin(self._hasher.root(salt=salt), prompt)
        if chain.num_missing_tokens <= self._hash_offload_tokens:
            chain.finish()
        else:
            await asyncio.to_thread(chain.finish)
        self._chains.keep(chain)
        return chain.hashes

    def _max_tokens(self, prompt_tokens: int, asked: int | None, param: str) -> int:
        """What was asked for, or the default within what is left. Raises PromptTooLong, NoReplica."""
        limit = self.max_model_len()
        if limit is None:
            error = NoReplica()
            self._routing.note_refused(error)  # no placer ever hears of it
            raise error
        if prompt_tokens + (asked or 1) > limit:
            raise PromptTooLong(prompt_tokens, asked or 1, limit, param=param)
        return asked or min(limit - prompt_tokens, self.config.default_max_tokens or limit)

    def _unique(self, asked: Asked) -> RequestId:
        """The client may reuse its id, even at once; reservations and replicas need one of their own."""
        return RequestId(f"{asked.request_id}-{secrets.token_hex(4)}")

    async def tokenize(self, body: TokenizeBody, visit: Visit = OPEN_VISIT) -> bytes:
        """The answer, as JSON. Raises ApiError."""
        salt = self.tenancy.salts.salt(visit.tenant, body.cache_salt)
        return await self._tokenization.tokenize(body, self.max_model_len(), salt, visit.tenant)

    async def detokenize(self, body: DetokenizeBody, visit: Visit = OPEN_VISIT) -> DetokenizeResponse:
        """Raises ApiError."""
        return await self._tokenization.detokenize(body, visit.tenant)

    async def soon(self, size: int, visit: Visit, job: Callable[[], T]) -> T:
        """`PromptEncoder.soon`, in the turn of whose request it is."""
        return await self._encoder.soon(size, visit.tenant, job)

    def close(self) -> None:
        """Check no structure any more. Idempotent."""
        self.forms.close()

    # --- about itself -------------------------------------------------------------------------

    def max_model_len(self) -> int | None:
        """See `About`."""
        return self.about.max_model_len()

    def hashing(self) -> ChainStatistics:
        """What is kept of prompts' hashes. O(1)."""
        return self._chains.statistics()

    def dashboard(self) -> Dashboard | None:
        """What the live page shows; None where it is off."""
        live = self.insight.live
        if live is None:
            return None
        return Dashboard(
            self.config,
            self._routing,
            self.insight,
            live,
            pins=self._directory.at_a_glance,
            wall_clock=self._wall_clock,
        )


def _beyond_max_tokens(body: RequestBody, max_tokens: int) -> str:
    """What is wrong with its `min_tokens`."""
    said = f"'min_tokens' must be between 0 and max_tokens ({max_tokens}), this one is {body.min_tokens}."
    if body.model_fields_set & {"max_tokens", "max_completion_tokens"}:
        return said
    return f"{said} Set 'max_tokens': without it this server's default holds, or what the context leaves."
