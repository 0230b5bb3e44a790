"""`python -m benchmarks.cache`: hit tokens and overhead of the cache disciplines on the same traffic.

Wires arguments, progress and the report together. Knows no measurement.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.arguments import positive, to_write
from benchmarks.cache import engine, pages, report
from benchmarks.cache.jobs import KINDS, Job, generated_jobs, trace_jobs
from benchmarks.cache.replay import replay
from benchmarks.cache.report import Row
from benchmarks.cache.timed import VERBS, TimedCache
from benchmarks.machine import CPUINFO, commit, cpu_name
from benchmarks.stopping import stoppable
from cache.block_hash import BlockHasher
from cache.counted import counted
from cache.disciplines import CacheDiscipline, paged_cache
from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.kv_cache_manager import KVCacheManager
from cache.prefix_cache import PrefixCache
from cache.radix_cache import RadixCache
from loadtest.placement.suites import default_trace
from loadtest.simulation.machine import H100_8B

TRACE = "trace"
# What an 80 GB card has left beside the simulated model; and so much less as the generated prompts are
# shorter, or nothing would ever be evicted.
GENERATED_TOKENS = 60_000
CACHE_TOKENS = {TRACE: 400_000, **dict.fromkeys(KINDS, GENERATED_TOKENS)}

DESCRIPTION = f"""\
Replay the same traffic under every cache discipline: what each finds again, and what its calls cost.

Traffic:
  {TRACE:<11}the conversation trace (WARMPATH_TRACE, else the excerpt that comes with the project)
  chats      multi-turn chats behind four system prompts, exact to the token
  few_shot   forty sets of examples, eight questions at once behind one of them
  twins      each question asked by four at once and answered alike
Production's scheduler runs it against each cache under a virtual clock, on the simulated machine that
`loadtest` compares policies on; prompts and answers are real tokens, hashed and compared as in production.

Columns:
  hit tokens, of prompts    prompt tokens found at a request's first admission
  beside 1st                hit tokens more than the traffic's first row has
  held twice                share of the memory that holds what is elsewhere in it as well, mean over steps
  TTFT s                    mean time to first token, modelled
  match .. release us       CPU microseconds of the middle call
  request us                CPU microseconds of all those calls, per request
Two more tables: what merging costs a real engine in CPU seconds, and what it would cost an engine to have
pages of one token, as the tree has.
"""
EPILOG = """\
examples:
  python -m benchmarks.cache                                       everything, some four minutes
  python -m benchmarks.cache --traffic chats twins --requests 200  half a minute
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    memory = min(_memory_tokens(traffic, options) for traffic in options.traffic)
    if options.block_size > memory:
        parser.error(
            f"argument --block-size: {options.block_size} is not from 1 to the {memory} tokens of memory"
        )
    began_s = time.monotonic()
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for traffic in options.traffic:
            task = progress.add_task(f"{traffic}: writing")
            jobs = _jobs(traffic, options.requests, options.seed)
            progress.remove_task(task)
            needed = max(len(job.prompt) + len(job.answer) for job in jobs) + options.block_size
            if _memory_tokens(traffic, options) < needed:
                progress.stop()
                parser.error(
                    f"argument --cache-tokens: {_memory_tokens(traffic, options)} is not at least {needed}, "
                    f"which the largest request of {traffic} takes"
                )
            for discipline in CacheDiscipline:
                task = progress.add_task(f"{traffic}: {discipline}", total=len(jobs))

                def told(done: int, task: TaskID = task) -> None:
                    progress.update(task, completed=done)

                rows.append(_row(traffic, discipline, jobs, options, told))
                progress.remove_task(task)
        progress.add_task("engine", total=None)
        merged = engine.measure(options.rounds, options.block_size)
        paged = [
            pages.measure(size, num_sequences=8, context=2048, rounds=5 * options.rounds)
            for size in (1, options.block_size)
        ]
    console = Console(highlight=False, width=report.WIDTH)
    console.print(report.table(rows))
    console.print(report.engine_table(merged))
    console.print(report.page_table(paged))
    console.print(_describe(options, time.monotonic() - began_s))
    if options.json is not None:
        found = {"rows": [asdict(row) for row in rows], "pages": [asdict(row) for row in paged]}
        found["engine"] = [asdict(row) for row in merged]
        options.json.write_text(json.dumps(found, indent=1))
    return 0


def _jobs(traffic: str, num_requests: int, seed: int) -> list[Job]:
    if traffic == TRACE:
        return trace_jobs(default_trace(), num_requests, seed)
    return generated_jobs(traffic, num_requests, seed)


def _memory_tokens(traffic: str, options: argparse.Namespace) -> int:
    tokens: int = options.cache_tokens or CACHE_TOKENS[traffic]
    return tokens


def _row(
    traffic: str,
    discipline: CacheDiscipline,
    jobs: Sequence[Job],
    options: argparse.Namespace,
    progress: Callable[[int], None],
) -> Row:
    cache = _cache(discipline, _memory_tokens(traffic, options), options.block_size)
    timed, twice = TimedCache(cache), list[int]()
    gc.collect()
    replayed = replay(
        timed,
        cache.stats().total,
        jobs,
        H100_8B,
        progress,
        each_step=partial(_note_twice, cache, twice),
    )
    return Row(
        traffic=traffic,
        discipline=discipline.value,
        replayed=replayed,
        twice=sum(twice) / max(1, len(twice)) / cache.stats().total,
        call_us={verb: timed.median_us(verb) for verb in VERBS},
        request_us=timed.total_us() / len(jobs),
    )


def _cache(discipline: CacheDiscipline, cache_tokens: int, block_size: int) -> PrefixCache:
    mark = Fingerprint("simulated", "", "simulated", "", block_size, HashAlgorithm.XXH3_128)
    hasher = BlockHasher(mark)
    if discipline is CacheDiscipline.RADIX_TREE:
        return RadixCache(cache_tokens, hasher)
    return paged_cache(discipline, cache_tokens // block_size, hasher, block_size=block_size)


def _note_twice(cache: PrefixCache, twice: list[int]) -> None:
    twice.append(cache.pool.num_duplicates if isinstance(cache, KVCacheManager) else 0)


def _describe(options: argparse.Namespace, took_s: float) -> str:
    """What was run where."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    return (
        f"{counted(options.requests, 'request')} each; memory, tokens: {_memory(options)}; blocks of "
        f"{options.block_size}; seed {options.seed}; pages: 8 decodes of 2,048 tokens; {took_s:.0f} s\n"
        f"{cpu_name(text)}, {counted(os.cpu_count() or 1, 'core')}, Python {platform.python_version()}, "
        f"git {commit(Path(__file__).parent)}"
    )


def _memory(options: argparse.Namespace) -> str:
    if options.cache_tokens is not None:
        return f"{options.cache_tokens:,}"
    return ", ".join(f"{CACHE_TOKENS[traffic]:,} ({traffic})" for traffic in options.traffic)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cache",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = (TRACE, *KINDS)
    parser.add_argument(
        "--traffic", nargs="+", choices=kinds, default=kinds, metavar="KIND", help=", ".join(kinds)
    )
    parser.add_argument("--requests", type=positive, default=1000, help="of each kind (default: 1,000)")
    parser.add_argument(
        "--cache-tokens",
        type=positive,
        metavar="N",
        help=f"memory, tokens (default: {CACHE_TOKENS[TRACE]:,}; generated traffic: {GENERATED_TOKENS:,})",
    )
    parser.add_argument("--block-size", type=positive, default=16, help="tokens (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="of the generated kinds (default: 0)")
    parser.add_argument("--rounds", type=positive, default=7, help="pairs of engine runs (default: 7)")
    parser.add_argument("--json", type=to_write, metavar="FILE", help="also write every number")
    return parser


if __name__ == "__main__":
    sys.exit(stoppable(main))
