"""Engines' reports under vLLM's names: what scrapers made for vLLM read is there, and adds up."""

from __future__ import annotations

from typing import Any

from cache.engine_report import BOUNDS
from cache.types import ReplicaId
from router.fleet.engine_series import EngineView, engine_families
from router.fleet.exposition import text
from tests.fakes.reports import a_distribution, an_engine_report
from tests.fakes.router import info
from tests.fakes.routers import Values, parsed, value

A, B = ReplicaId("a1"), ReplicaId("b2")
# What vLLM's own dashboard, production-stack's scraper, llm-d's picker and aiperf read.
READ_BY_OTHERS = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_preemptions_total"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    *("vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_by_source_total"),
    *("vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket"),
    *("vllm:request_time_per_output_token_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket"),
    *("vllm:request_queue_time_seconds_bucket", "vllm:request_prefill_time_seconds_bucket"),
    *("vllm:request_decode_time_seconds_bucket", "vllm:request_inference_time_seconds_bucket"),
    *("vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket"),
    *("vllm:request_params_max_tokens_bucket", "vllm:iteration_tokens_total_bucket"),
    *("vllm:request_success_total", "vllm:cache_config_info"),
)


def shown(**engines: dict[str, Any]) -> Values:
    views = {
        ReplicaId(name): EngineView(info(), an_engine_report(**numbers)) for name, numbers in engines.items()
    }
    return parsed(text(engine_families("tiny", views)))


def test_what_others_read_is_there_before_anything_has_happened() -> None:
    names = {name for name, _ in shown(a1={})}
    assert names >= set(READ_BY_OTHERS)


def test_every_series_carries_vllms_labels() -> None:
    for _, labels in shown(a1={}, b2={}):
        assert {"model_name", "engine"} <= dict(labels).keys()


def test_usage_is_a_share_of_all_blocks() -> None:
    values = shown(a1={"used_blocks": 25, "total_blocks": 100}, b2={"total_blocks": 0})
    assert value(values, "vllm:kv_cache_usage_perc", model_name="tiny", engine=A) == 0.25
    assert value(values, "vllm:kv_cache_usage_perc", model_name="tiny", engine=B) == 0.0


def test_what_another_replica_goes_on_with_is_not_among_the_cancelled() -> None:
    values = shown(a1={"handed_over": 2, "aborted": 1})
    for reason, number in (("handed_over", 2), ("abort", 1)):
        labels = {"model_name": "tiny", "engine": A, "finished_reason": reason}
        assert value(values, "vllm:request_success_total", **labels) == number


def test_prompt_tokens_by_source_sum_to_prompt_tokens() -> None:
    values = shown(a1={"prompt_tokens": 100, "cached_prompt_tokens": 60})
    by_source = {
        dict(labels)["source"]: number
        for (name, labels), number in values.items()
        if name == "vllm:prompt_tokens_by_source_total"
    }
    assert by_source == {"local_compute": 40, "local_cache_hit": 60, "external_kv_transfer": 0}


def test_buckets_are_cumulative_up_to_the_count() -> None:
    values = shown(a1={"first_token_s": a_distribution("first_token_s", 0.001, 0.002, 0.3, 9999.0)})

    def bucket(le: str) -> float | None:
        name = "vllm:time_to_first_token_seconds_bucket"
        return value(values, name, model_name="tiny", engine=A, le=le)

    assert [bucket(le) for le in ("0.001", "0.005", "0.25", "0.5", "2560.0", "+Inf")] == [1, 2, 2, 3, 3, 4]
    assert value(values, "vllm:time_to_first_token_seconds_count", model_name="tiny", engine=A) == 4
    total = value(values, "vllm:time_to_first_token_seconds_sum", model_name="tiny", engine=A)
    assert total == 0.001 + 0.002 + 0.3 + 9999.0


def test_every_distribution_of_a_report_is_shown() -> None:
    values = shown(a1={name: a_distribution(name, 1.0, 2.0) for name in BOUNDS})
    sums = [number for (name, _), number in values.items() if name.endswith("_sum")]
    assert sums == [3.0] * len(BOUNDS)


def test_one_that_has_not_reported_shows_its_settings_alone() -> None:
    values = parsed(text(engine_families("tiny", {A: EngineView(info(num_blocks=77), None)})))
    ((name, labels),) = values
    assert name == "vllm:cache_config_info"
    assert dict(labels)["num_gpu_blocks"] == "77"
    assert dict(labels)["block_size"] == "16"
