"""Engines' reports as series under vLLM's names: dashboards and scrapers made for it work here.

Names, kinds, labels (`model_name`, `engine`) and bounds are vLLM's; `engine` is the replica's id, where vLLM
counts the engines of one process. What vLLM has no name for is `warmpath_engine_*`.
Knows reports and names; knows neither where reports come from nor how series are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from cache.engine_report import BOUNDS, Distribution, EngineReport
from cache.messages import ReplicaInfo
from cache.types import ReplicaId
from router.fleet.report import Family, Series


@dataclass(frozen=True, slots=True)
class EngineView:
    """One replica, as metrics tell it."""

    info: ReplicaInfo
    report: EngineReport | None  # None: it has not reported yet


_GAUGES: tuple[tuple[str, str, Callable[[EngineReport], float]], ...] = (
    ("vllm:num_requests_running", "Requests in the engine's steps.", lambda r: r.num_running),
    ("vllm:num_requests_waiting", "Requests in the engine's queue.", lambda r: r.num_waiting),
    (
        "vllm:kv_cache_usage_perc",
        "Share of KV blocks in use by running requests and held prefixes, 0 to 1.",
        lambda r: r.used_blocks / r.total_blocks if r.total_blocks else 0.0,
    ),
    (
        "warmpath_engine_cached_blocks",
        "Blocks whose content a prompt may hit, in use or not.",
        lambda r: r.cached_blocks,
    ),
    ("warmpath_engine_blocks", "KV blocks the engine has.", lambda r: r.total_blocks),
    (
        "warmpath_engine_pinned_blocks",
        "Of those, blocks that held prefixes keep from being evicted.",
        lambda r: r.pinned_blocks,
    ),
    (
        "warmpath_engine_max_pinned_blocks",
        "Blocks that held prefixes may have.",
        lambda r: r.max_pinned_blocks,
    ),
    (
        "warmpath_engine_host_blocks",
        "Blocks in host memory: evicted ones, and those of requests put back.",
        lambda r: r.host_blocks,
    ),
    (
        "warmpath_engine_max_host_blocks",
        "Blocks that it holds at most.",
        lambda r: r.max_host_blocks,
    ),
    (
        "warmpath_engine_swapped_blocks",
        "Of those in host memory, blocks of requests put back into the queue.",
        lambda r: r.swapped_blocks,
    ),
    ("warmpath_engine_step_budget", "Tokens that a step may have now.", lambda r: r.step_budget),
    ("warmpath_engine_pins", "Held prefixes.", lambda r: len(r.pins)),
)

_COUNTERS: tuple[tuple[str, str, Callable[[EngineReport], float]], ...] = (
    ("vllm:prompt_tokens", "Tokens of prompts that got a first token.", lambda r: r.prompt_tokens),
    (
        "vllm:prompt_tokens_cached",
        "Of those, tokens taken from the prefix cache.",
        lambda r: r.cached_prompt_tokens,
    ),
    ("vllm:generation_tokens", "Tokens generated.", lambda r: r.generated_tokens),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache, once per request.",
        lambda r: r.queried_tokens,
    ),
    ("vllm:prefix_cache_hits", "Prompt tokens found there.", lambda r: r.cached_prompt_tokens),
    ("vllm:num_preemptions", "Requests put back into the queue for want of blocks.", lambda r: r.preemptions),
    (
        "warmpath_engine_swapped",
        "Of those, requests whose blocks were copied to host memory.",
        lambda r: r.swapped,
    ),
    (
        "warmpath_engine_host_hits",
        "Blocks that a prompt found in host memory, copied back.",
        lambda r: r.host_hits,
    ),
    (
        "warmpath_engine_host_declined",
        "Blocks that a prompt found there, computed anew because that was cheaper.",
        lambda r: r.host_declined,
    ),
    ("warmpath_engine_host_saves", "Blocks copied to host memory.", lambda r: r.host_saves),
    ("warmpath_engine_host_loads", "Blocks copied back from host memory.", lambda r: r.host_loads),
    (
        "warmpath_engine_left_unread",
        "Requests ended because too much of their answer lay unread.",
        lambda r: r.left_unread,
    ),
    ("warmpath_engine_steps", "Steps computed.", lambda r: r.steps),
    ("warmpath_engine_failed_steps", "Steps whose forward failed.", lambda r: r.failed_steps),
    (
        "warmpath_engine_computed_tokens",
        "Tokens computed, those computed again after a preemption included.",
        lambda r: r.computed_tokens,
    ),
    (
        "warmpath_engine_decode_tokens",
        "Of those, computed one at a time for answers; the others are parts of prompts.",
        lambda r: r.decode_tokens,
    ),
    ("warmpath_engine_mixed_steps", "Steps with parts of prompts beside decodes.", lambda r: r.mixed_steps),
    (
        "warmpath_engine_cut_steps",
        "Steps that could have held more of prompts, but for the decodes beside them.",
        lambda r: r.cut_steps,
    ),
    (
        "warmpath_engine_early_steps",
        "Steps that could have held more of prompts, but for those that ended with them.",
        lambda r: r.early_steps,
    ),
    (
        "warmpath_engine_out_of_memory_steps",
        "Steps that ran out of memory, were taken back and made smaller.",
        lambda r: r.out_of_memory_steps,
    ),
    (
        "warmpath_engine_compiled_structures",
        "Schemas, expressions and grammars compiled; those kept are not compiled again.",
        lambda r: r.compiled_structures,
    ),
    (
        "warmpath_engine_refused_structures",
        "Of those, structures that could not be followed.",
        lambda r: r.refused_structures,
    ),
)

_SOURCES: tuple[tuple[str, Callable[[EngineReport], float]], ...] = (
    ("local_compute", lambda r: r.prompt_tokens - r.cached_prompt_tokens),
    ("local_cache_hit", lambda r: r.cached_prompt_tokens),
    ("external_kv_transfer", lambda r: 0.0),  # no replica fetches blocks from another; dashboards sum over it
)

_ENDINGS: tuple[tuple[str, Callable[[EngineReport], float]], ...] = (
    ("stop", lambda r: r.stopped),
    ("length", lambda r: r.length_limited),
    ("handed_over", lambda r: r.handed_over),
    ("abort", lambda r: r.aborted),
    ("error", lambda r: r.failed),
)

_HISTOGRAMS: tuple[tuple[str, str, str], ...] = (
    (
        "vllm:time_to_first_token_seconds",
        "From a request's arrival at the engine to its first token.",
        "first_token_s",
    ),
    ("vllm:inter_token_latency_seconds", "Between two tokens of a request.", "inter_token_s"),
    (
        "vllm:request_time_per_output_token_seconds",
        "Mean time between the tokens of a finished request.",
        "per_output_token_s",
    ),
    ("vllm:e2e_request_latency_seconds", "From arrival to the end, of a finished request.", "request_s"),
    ("vllm:request_queue_time_seconds", "From arrival until the engine took it into a step.", "queue_s"),
    ("vllm:request_prefill_time_seconds", "From there to its first token.", "prefill_s"),
    ("vllm:request_decode_time_seconds", "From its first token to its last.", "decode_s"),
    ("vllm:request_inference_time_seconds", "Prefill and decode together.", "inference_s"),
    ("vllm:request_prompt_tokens", "Prompt tokens of a finished request.", "prompt_length"),
    (
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens of a finished request that were not in the cache.",
        "computed_length",
    ),
    ("vllm:request_generation_tokens", "Tokens generated for a finished request.", "output_length"),
    ("vllm:request_params_max_tokens", "Tokens a finished request had asked for.", "max_tokens"),
    ("vllm:iteration_tokens_total", "Tokens computed in one step.", "step_tokens"),
    ("warmpath_engine_step_sequences", "Sequences in one step.", "step_sequences"),
    (
        "warmpath_engine_structure_compile_seconds",
        "To compile one structure, beside the engine's thread.",
        "compile_s",
    ),
    (
        "warmpath_engine_structure_mask_seconds",
        "Of one step, spent on what structures allow; steps without any do not count.",
        "mask_s",
    ),
)

_LE = {name: (*map(str, bounds), "+Inf") for name, bounds in BOUNDS.items()}


def engine_families(model_name: str, engines: Mapping[ReplicaId, EngineView]) -> Iterable[Family]:
    """Every engine's series. Families without a series are there too, for whoever checks what exists."""
    labels = {replica: {"model_name": model_name, "engine": replica} for replica in engines}
    reports = [(labels[name], view.report) for name, view in engines.items() if view.report is not None]
    for name, text, value in _GAUGES:
        series = tuple(Series(name, label, float(value(report))) for label, report in reports)
        yield Family(name, text, "gauge", series)
    for name, text, value in _COUNTERS:
        series = tuple(Series(f"{name}_total", label, float(value(report))) for label, report in reports)
        yield Family(name, text, "counter", series)
    yield _split(
        "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", "source", _SOURCES, reports
    )
    yield _split(
        "vllm:request_success", "Requests ended, by how they ended.", "finished_reason", _ENDINGS, reports
    )
    for name, text, field in _HISTOGRAMS:
        lines: list[Series] = []
        for label, report in reports:
            lines += _histogram(name, label, _LE[field], getattr(report, field))
        yield Family(name, text, "histogram", tuple(lines))
    yield _cache_config(labels, engines)


def _split(
    name: str,
    text: str,
    label_name: str,
    parts: Iterable[tuple[str, Callable[[EngineReport], float]]],
    reports: Iterable[tuple[dict[str, str], EngineReport]],
) -> Family:
    series = [
        Series(f"{name}_total", {**label, label_name: part}, float(value(report)))
        for label, report in reports
        for part, value in parts
    ]
    return Family(name, text, "counter", tuple(series))


def _histogram(
    name: str, label: dict[str, str], bounds: Iterable[str], distribution: Distribution
) -> list[Series]:
    running = [float(count) for count in accumulate(distribution.counts)]
    bucket = f"{name}_bucket"
    lines = [
        Series(bucket, {**label, "le": bound}, count) for bound, count in zip(bounds, running, strict=True)
    ]
    lines.append(Series(f"{name}_count", label, running[-1]))
    lines.append(Series(f"{name}_sum", label, distribution.total))
    return lines


def _cache_config(
    labels: Mapping[ReplicaId, dict[str, str]], engines: Mapping[ReplicaId, EngineView]
) -> Family:
    """What schedulers that place by prefix read once: vLLM tells its cache's settings as labels."""
    series = [
        Series(
            "vllm:cache_config_info",
            {
                **labels[replica],
                "block_size": str(view.info.fingerprint.block_size),
                "num_gpu_blocks": str(view.info.num_blocks),
                "cache_dtype": view.info.fingerprint.kv_dtype,
                "enable_prefix_caching": str(view.info.has_prefix_cache),
            },
            1.0,
        )
        for replica, view in engines.items()
    ]
    return Family("vllm:cache_config_info", "The cache's settings, as labels.", "gauge", tuple(series))
