"""What an engine has done, counted: tokens, ends, and how long each part of a request took.

    arrival ──queue──> admitted ──prefill──> first token ──decode──> last token
            <────────── first_token_s ─────>             <─ inter_token_s each ─>

Knows requests, steps and times; knows neither metric names nor how a report travels. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from cache.engine_report import BOUNDS, FORMAT_VERSION, EngineReport, HeldPin, Tally
from cache.host_tier import HostTotals
from cache.kv_cache_manager import CacheStats
from cache.messages import FinishReason
from replica.engine.engine_stats import EngineStats
from replica.scheduling.request import Request
from replica.scheduling.runner import ScheduledSequence
from replica.scheduling.step_time import StepWork
from replica.structures.compiler import CompileTotals


class Ending(Enum):
    """How a request left the engine."""

    STOP = "stop"
    LENGTH = "length"
    HANDED_OVER = "handed_over"  # this replica leaves, and another goes on with it
    ABORTED = "aborted"  # cancelled, past its deadline, not read, or never begun
    FAILED = "failed"  # its forward failed

    @classmethod
    def of(cls, reason: FinishReason) -> Ending:
        return cls.STOP if reason is FinishReason.STOP else cls.LENGTH


class EngineMeter:
    """Counters since the start. One call per token, under a microsecond."""

    def __init__(self, *, looks_up_prefixes: bool) -> None:
        """looks_up_prefixes: False for an engine without a prefix cache, whose prompts query nothing."""
        self._looks_up_prefixes = looks_up_prefixes
        self.num_failed_steps = 0
        self._num_steps = self._computed_tokens = 0
        self._prompt_s = 0.0
        self._prompt_tokens = self._cached_prompt_tokens = self._queried_tokens = 0
        self._generated_tokens = self._nobodys_tokens = 0
        self._decode_tokens = self._mixed_steps = self._out_of_memory_steps = 0
        self._left_unread = 0
        self._ended = dict.fromkeys(Ending, 0)
        self._tallies = {name: Tally(bounds) for name, bounds in BOUNDS.items() if name != "compile_s"}
        self._inter_token_s = self._tallies["inter_token_s"]  # the one that every token needs

    def stepped(self, sequences: Sequence[ScheduledSequence], work: StepWork, elapsed_s: float) -> None:
        """A step was computed. work: of its sequences."""
        self._num_steps += 1
        self._computed_tokens += work.new_tokens
        if work.new_tokens > work.sequences:  # somebody's prompt: a decode is one token of each sequence
            self._prompt_s += elapsed_s
        self._tallies["step_tokens"].add(work.new_tokens)
        self._tallies["step_sequences"].add(work.sequences)
        # One token each, and none of a prompt: the last one of a cached prompt comes alone, too.
        num_decodes = sum([s.num_new_tokens == 1 and s.start >= s.num_prompt_tokens for s in sequences])
        self._decode_tokens += num_decodes
        self._mixed_steps += 0 < num_decodes < work.sequences
        if (mask_s := _mask_s(sequences)) is not None:
            self._tallies["mask_s"].add(mask_s)

    def step_failed(self) -> None:
        """A step raised, and its requests failed."""
        self.num_failed_steps += 1

    def ran_out_of_memory(self) -> None:
        """A step did not fit, and was taken back."""
        self._out_of_memory_steps += 1

    def left_unread(self) -> None:
        """A request's client did not read; its answers are aborted."""
        self._left_unread += 1

    def got_token(self, request: Request, now_s: float) -> None:
        """The request has one more token, sampled at `now_s`."""
        self._generated_tokens += 1
        if request.last_token_s is None:
            request.first_token_s = now_s
            self._count_prompt(request, now_s)
        else:
            self._inter_token_s.add(now_s - request.last_token_s)
        request.last_token_s = now_s

    def token_is_nobodys(self) -> None:
        """The one that a request has just got, whose prompt was computed to be held."""
        self._nobodys_tokens += 1

    def ended(self, request: Request, ending: Ending, now_s: float) -> None:
        """The request is over. One that never got a token here tells nothing of latencies, and a prompt that
        was only to be cached is nobody's request."""
        if request.for_cache:
            return
        self._ended[ending] += 1
        if ending not in (Ending.STOP, Ending.LENGTH):
            return
        admitted_s, first_s, last_s = request.admitted_s, request.first_token_s, request.last_token_s
        if admitted_s is None or first_s is None or last_s is None:
            return  # a continued stream that had come to its end before it came here
        tallies, num_output = self._tallies, request.num_tokens_here
        tallies["request_s"].add(now_s - request.arrival_s)
        tallies["queue_s"].add(admitted_s - request.arrival_s)
        tallies["prefill_s"].add(first_s - admitted_s)
        tallies["decode_s"].add(last_s - first_s)
        tallies["inference_s"].add(last_s - admitted_s)
        tallies["prompt_length"].add(request.num_prompt_tokens)
        tallies["computed_length"].add(_num_computed(request))
        tallies["output_length"].add(num_output)
        tallies["max_tokens"].add(request.sampling.max_tokens)
        if num_output > 1:
            tallies["per_output_token_s"].add((last_s - first_s) / (num_output - 1))

    def stats(
        self, *, cache: CacheStats, preemptions: int, steps_ahead: int, wasted_tokens: int
    ) -> EngineStats:
        """The totals now, with the engine's own numbers. Asked for with every step."""
        return EngineStats(
            cache=cache,
            num_steps=self._num_steps,
            num_failed_steps=self.num_failed_steps,
            computed_tokens=self._computed_tokens,
            output_tokens=self._generated_tokens - self._nobodys_tokens,
            preemptions=preemptions,
            prompt_s=self._prompt_s,
            steps_ahead=steps_ahead,
            wasted_tokens=wasted_tokens,
        )

    def report(
        self,
        *,
        epoch: int,
        number: int,
        num_running: int,
        num_waiting: int,
        used_blocks: int,
        cached_blocks: int,
        total_blocks: int,
        pinned_blocks: int,
        max_pinned_blocks: int,
        pins: tuple[HeldPin, ...],
        preemptions: int,
        cut_steps: int,
        early_steps: int,
        swapped: int,
        host: HostTotals,
        step_budget: int,
        structures: CompileTotals,
    ) -> EngineReport:
        """The totals now, with the engine's own numbers. Some 20 microseconds."""
        return EngineReport(
            version=FORMAT_VERSION,
            epoch=epoch,
            number=number,
            num_running=num_running,
            num_waiting=num_waiting,
            used_blocks=used_blocks,
            cached_blocks=cached_blocks,
            total_blocks=total_blocks,
            pinned_blocks=pinned_blocks,
            max_pinned_blocks=max_pinned_blocks,
            pins=pins,
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_prompt_tokens,
            queried_tokens=self._queried_tokens,
            generated_tokens=self._generated_tokens - self._nobodys_tokens,
            stopped=self._ended[Ending.STOP],
            length_limited=self._ended[Ending.LENGTH],
            handed_over=self._ended[Ending.HANDED_OVER],
            aborted=self._ended[Ending.ABORTED],
            failed=self._ended[Ending.FAILED],
            left_unread=self._left_unread,
            preemptions=preemptions,
            swapped=swapped,
            host_blocks=host.used,
            max_host_blocks=host.total,
            swapped_blocks=host.swapped,
            host_hits=host.hits,
            host_declined=host.declined,
            host_saves=host.saved,
            host_loads=host.loaded,
            steps=self._num_steps,
            failed_steps=self.num_failed_steps,
            computed_tokens=self._computed_tokens,
            decode_tokens=self._decode_tokens,
            mixed_steps=self._mixed_steps,
            cut_steps=cut_steps,
            early_steps=early_steps,
            out_of_memory_steps=self._out_of_memory_steps,
            step_budget=step_budget,
            compiled_structures=structures.num_compiled,
            refused_structures=structures.num_refused,
            compile_s=structures.compile_s,
            **{name: tally.distribution() for name, tally in self._tallies.items()},
        )

    def _count_prompt(self, request: Request, now_s: float) -> None:
        """Once, however often it was preempted or had to wait for room, and however many answers it has."""
        if not request.for_cache:  # nobody waited for that token
            self._tallies["first_token_s"].add(now_s - request.arrival_s)
        if request.has_followed:
            return
        cached = request.cached_tokens or 0
        self._prompt_tokens += request.num_prompt_tokens
        self._cached_prompt_tokens += cached
        if self._looks_up_prefixes and not request.is_scored:
            self._queried_tokens += request.num_prompt_tokens


def _num_computed(request: Request) -> int:
    """Tokens of its prompt that were computed for it: none where another answer's were."""
    return 0 if request.has_followed else request.num_prompt_tokens - (request.cached_tokens or 0)


def _mask_s(sequences: Sequence[ScheduledSequence]) -> float | None:
    """Seconds that a step has just spent on what structures allow; None if it asked none."""
    asked = [each.structure.mask_s for each in sequences if each.structure is not None and each.samples]
    return sum(asked) if asked else None
