"""From what a Router sends to what the engine works on: a `GenerateRequest`, checked, as a request an answer.

Knows the model's limits, texts' decoders and structures; starts nothing, and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cache.kv_cache_manager import KVCacheManager
from cache.messages import GenerateRequest
from replica.engine.answers import answers_of, have_begun
from replica.engine.pins import EnginePins
from replica.output.detokenizer import MAX_CONTEXT_TOKENS, Detokenizer, TokenDecoder
from replica.output.logprob_log import LogprobLog
from replica.scheduling.request import Request, check_request, copy_tokens
from replica.scheduling.runner import RunnerInfo
from replica.scheduling.sampling_rules import check_sampling
from replica.scheduling.scheduler import Scheduler
from replica.structures.compiler import Structures
from replica.structures.matcher import StructureMatcher


class Intake:
    """One engine's."""

    def __init__(
        self,
        info: RunnerInfo,
        cache: KVCacheManager,
        scheduler: Scheduler,
        pins: EnginePins,
        *,
        max_model_len: int,
        decoder: TokenDecoder,
        spelling_decoder: TokenDecoder,
        structures: Structures,
        clock: Callable[[], float],
    ) -> None:
        """scheduler: asked for room, and nothing else. spelling_decoder: has special tokens in its texts."""
        self._info = info
        self._cache = cache
        self._scheduler = scheduler
        self._pins = pins
        self._max_model_len = max_model_len
        self._decoder = decoder
        self._spelling_decoder = spelling_decoder
        self._structures = structures
        self._clock = clock

    def admit(
        self, request: GenerateRequest, arrival_s: float | None, structure: StructureMatcher | None
    ) -> tuple[list[Request], bool]:
        """One request for each answer it wants, and whether they begin together: the first leads the others.

        arrival_s, structure and what is raised: as `EngineCore.take` has them.
        """
        answers = answers_of(request)
        for _, answer in answers:
            check_request(answer, self._info.vocab_size)
        check_sampling(request.sampling, self._info)
        if request.pin is not None:
            self._pins.check(request)
        minimum = request.sampling.min_tokens
        if structure is None and request.structure is not None:
            structure = self._structures.begin(request.structure, min_tokens=minimum, tenant=request.tenant)
        for _, answer in answers:
            self._scheduler.check_new(answer.request_id)
        self._scheduler.check_room(  # of one prompt and as much output each: one for all
            request.num_prompt_tokens,
            self._max_output(request),
            tenant=request.tenant,
            share=request.share,
            priority=request.priority,
            deadline_s=request.deadline_s,
            is_retry=request.attempt > 0,
        )
        arrival_s = self._clock() if arrival_s is None else arrival_s
        taken: list[Request] = []
        goes_on = have_begun(answers)
        for choice, answer in answers:
            own = structure if structure is None or not taken else structure.begun(minimum)
            taken.append(self._request(answer, choice, arrival_s, own, goes_on=goes_on))
        return taken, not goes_on

    def _max_output(self, request: GenerateRequest) -> int:
        return max(1, min(request.sampling.max_tokens, self._max_model_len - request.num_prompt_tokens))

    def _request(
        self,
        request: GenerateRequest,
        choice: int,
        arrival_s: float,
        structure: StructureMatcher | None,
        *,
        goes_on: bool,
    ) -> Request:
        """One answer's, as scheduler and steps know it."""
        drawn_by, ended_by = request.sampling, request.sampling
        if structure is not None:
            # Its mask says when the text may end; and where it may, an end that is drawn is one.
            drawn_by, ended_by = replace(drawn_by, min_tokens=0), replace(ended_by, ignore_eos=False)
        token_ids, max_output = copy_tokens(request.token_ids), self._max_output(request)
        is_scored = _is_scored(request)
        return Request(
            request_id=request.request_id,
            token_ids=token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            max_output_tokens=max_output,
            sampling=drawn_by,
            seed=request.seed,
            arrival_s=arrival_s,
            waited_s=request.waited_s,
            expires_s=None if request.deadline_s is None else arrival_s + request.deadline_s,
            blocks=self._cache.begin(
                token_ids,
                salt=request.cache_salt,
                adapter=request.adapter,
                block_hashes=request.block_hashes,
                looks_up=not is_scored,
            ),
            detokenizer=Detokenizer(
                self._decoder if ended_by.skip_special_tokens else self._spelling_decoder,
                ended_by,
                self._info.eos_token_ids,
                max_tokens=max_output,
                sent_chars=request.sent_chars,
                prompt=token_ids[_context_of(request)],
            ),
            num_earlier_tokens=len(token_ids) - request.num_prompt_tokens,
            goes_on=goes_on,
            traceparent=request.traceparent,
            lease=request.pin,
            for_cache=request.pin is not None or request.for_cache,
            logprobs=_logprob_log(request, is_scored=is_scored),
            is_scored=is_scored,
            choice=choice,
            tenant=request.tenant,
            share=request.share,
            priority=request.priority,
            structure=structure,
        )


def _context_of(request: GenerateRequest) -> slice:
    """The prompt's last tokens, behind which the output is decoded."""
    return slice(max(0, request.num_prompt_tokens - MAX_CONTEXT_TOKENS), request.num_prompt_tokens)


def _is_scored(request: GenerateRequest) -> bool:
    """Whether its prompt is, here. What an earlier attempt has sent of the prompt's, it has sent."""
    is_first = len(request.token_ids) == request.num_prompt_tokens
    return is_first and request.sampling.prompt_logprobs is not None


def _logprob_log(request: GenerateRequest, *, is_scored: bool) -> LogprobLog | None:
    """None if nobody asked."""
    if request.sampling.logprobs is None and not is_scored:
        return None
    return LogprobLog(request.num_prompt_tokens - 1 if is_scored else 0)
