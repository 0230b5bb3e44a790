"""`python -m loadtest replay`: a trace sent to a running server at its own times."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from rich.console import Console

from loadtest.client.asking import TIMEOUT_HELP
from loadtest.client.endpoint import KEY_VARIABLE, Endpoint
from loadtest.commands.options import add_trace, trace_of
from loadtest.commands.serving import StoppedEarly, add_report, add_targets, targets_of
from loadtest.comparison.conditions import conditions
from loadtest.comparison.errors import NoAnswers
from loadtest.comparison.load import Load, send
from loadtest.comparison.plan import Cell
from loadtest.comparison.progress import ComparisonProgress
from loadtest.comparison.report import check_plots, report
from loadtest.comparison.results import Results, Run
from loadtest.open_loop.calibration import tokens_per_word
from loadtest.open_loop.ceiling import infinite_cache_hit_ratio
from loadtest.open_loop.open_files import check_files
from loadtest.open_loop.prompts import PromptMaker, TextPrompts, TokenPrompts
from loadtest.open_loop.schedule import Stretch, schedule, shortened
from loadtest.placement import arguments as read
from loadtest.placement.errors import BadRequest
from loadtest.report_folder import check_folder
from loadtest.workloads.reference import WorkloadRef

SUMMARY = "send a trace to a running server at its own times"
DESCRIPTION = f"""\
An open loop: every request is sent when the trace says, whatever has become of earlier ones. Prompts are made
up so that their blocks repeat exactly as in the trace. How late the client itself was is measured and
reported, and all times count from when a request was due, so a client that falls behind cannot hide it.

Reads recordings of this service (`record:` in deploy.yaml) and Mooncake's format. Status 1 if an answer was
not whole; requests refused as busy are counted, and no error. {KEY_VARIABLE} is the key's variable.

examples
  python -m loadtest replay --url http://127.0.0.1:8000 --trace mine.jsonl
  python -m loadtest replay --url http://127.0.0.1:8000 --speedup 0.5 --max-context 4k --duration 300
  python -m loadtest replay --url https://api.example.com/v1 --text --trace mine.jsonl --requests 200
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="an OpenAI-compatible server (default: %(default)s)")
    add("--key", help=f"API key, if needed (default: ${KEY_VARIABLE})")
    add("--model", help="what to ask for (default: the first model that the server lists)")
    add_trace(parser)
    add("--speedup", type=read.load, default=1.0, metavar="X", help="times the trace's rate (default: 1)")
    add("--start", type=read.seconds, default=0.0, metavar="S", help="of the trace's time (default: 0)")
    add("--duration", type=read.positive_seconds, metavar="S", help="of the trace's time (default: all)")
    add(
        "--whole-sessions",
        action="store_true",
        help="sessions that begin in that stretch, and these to their end",
    )
    add("--requests", type=read.count, metavar="N", help="at most so many")
    add("--warm", type=read.seconds, default=0.0, metavar="S", help="of the replay's time, not counted")
    add("--max-context", type=read.tokens, metavar="TOKENS", help="cut prompts to fit with their answers")
    add("--max-output", type=read.count, metavar="TOKENS", help="cut answers")
    add("--text", action="store_true", help="prompts as text, for servers that take no token ids")
    add("--own-length", action="store_true", help="let the model end answers (no `ignore_eos`)")
    add("--timeout", type=read.positive_seconds, default=300.0, metavar="S", help=TIMEOUT_HELP)
    add("--seed", type=read.whole, default=0, metavar="N", help="of the prompts' content (default: 0)")
    add_targets(parser)
    add_report(parser, "replay")


def run(options: argparse.Namespace, console: Console) -> None:
    check_plots(with_plots=not options.no_plots)
    check_folder(options.out)
    reference = trace_of(options)
    load, ceiling = _load(options, reference)
    check_files(load.arrivals)
    endpoint = Endpoint.find(options.url, key=options.key, model=options.model)
    if options.text:
        load = _with_text(load, endpoint, reference)
    rate = max(len(load.arrivals) - 1, 1) / (load.arrivals[-1].due_s or 1.0)
    cell = Cell(reference, rate, load.arrivals[-1].due_s)
    with ComparisonProgress(console) as progress:
        sent = send(endpoint, load, progress.running(options.url, cell, len(load.arrivals)))
    run = Run(
        contender=options.url,
        workload=reference.label,
        rate_per_s=round(rate, 3),
        repeat=0,
        seed=options.seed,
        kind="fixed",
        ceiling=ceiling,
        tally=sent.tally,
        is_whole=sent.is_whole,
        was_stopped=sent.was_interrupted,
    )
    if not sent.tally.answers and not sent.was_interrupted:
        raise NoAnswers(options.url, sent.tally.due, _problems(run))
    results = Results(
        conditions=conditions(sys.argv[1:]),
        contenders=(options.url,),
        engines={options.url: f"model {endpoint.model}, as it runs there"},
        targets=load.targets,
        runs=(run,) if sent.tally.answers else (),
        was_stopped=sent.was_interrupted,
    )
    report(results, options.out, console, with_plots=not options.no_plots)
    if sent.was_interrupted:
        raise StoppedEarly(results)
    results.require_whole_answers()


def _load(options: argparse.Namespace, reference: WorkloadRef) -> tuple[Load, float]:
    """What to send, and the hit ratio of an infinite cache on what counts of it.

    Raises WorkloadError, and BadRequest if nothing of it would count.
    """
    trace = reference.trace()
    stretch = Stretch(
        start_s=options.start,
        duration_s=options.duration,
        whole_sessions=options.whole_sessions,
        max_requests=options.requests,
        speedup=options.speedup,
    )
    arrivals = shortened(
        schedule(trace, stretch), max_tokens=options.max_context, max_output=options.max_output
    )
    salt = f"replay {options.seed}"
    prompts: PromptMaker = TokenPrompts(trace.block_tokens, salt)
    first = next((at for at, arrival in enumerate(arrivals) if arrival.due_s >= options.warm), None)
    if first is None:
        raise BadRequest(
            f"--warm {options.warm:g}: the last request is due at {arrivals[-1].due_s:.3g} s: none counts"
        )
    load = Load(
        arrivals=arrivals,
        prompts=prompts,
        targets=targets_of(options),
        counted_from_s=arrivals[first].due_s,
        salt=salt,
        ignore_eos=not options.own_length,
        timeout_s=options.timeout,
    )
    requests = [arrival.request for arrival in arrivals]
    return load, infinite_cache_hit_ratio(requests, trace.block_tokens, counted_from=first)


def _with_text(load: Load, endpoint: Endpoint, reference: WorkloadRef) -> Load:
    block_tokens = reference.trace().block_tokens
    ratio = tokens_per_word(endpoint)
    return replace(load, prompts=TextPrompts(block_tokens, load.salt, tokens_per_word=ratio))


def _problems(run: Run) -> str:
    return "; ".join(
        f"{number} {kind}: {' | '.join(run.tally.problems.get(kind, ())[:2])}"
        for kind, number in run.tally.failures.items()
    )
