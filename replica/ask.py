"""`python -m replica ask`: what a cached prefix is worth, shown on this machine in one minute.

Asks two questions about one long table, one after the other. The second finds the table's blocks in the cache
and computes its own few tokens only. Presentation and a stopwatch; the engine is the server's own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jinja2
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cache.messages import GenerateRequest, SamplingParams
from cache.types import RequestId, pack_tokens
from replica.assembly import Assembly, assemble
from replica.config import ReplicaConfig
from replica.engine.engine_core import EngineCore
from replica.models.model_source import ModelRefused
from replica.output import sample_table

SNIPPET_CHARS = 48

DESCRIPTION = """\
Ask two questions about one long table, one after the other, and print the time to the first token of each.

The questions differ, the table before them does not. The first question computes keys and values for
every token of the table; the second finds them in the cache and computes its own few tokens only.
"""
EPILOG = """\
examples:
  python -m replica ask                                  the embedded tiny model, which speaks nonsense
  python -m replica ask --model Qwen/Qwen3-0.6B          a model from the hub, fetched at the first use
  python -m replica ask --model ./my-model --device cuda a local folder with safetensors, on a GPU
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """One question's outcome."""

    question: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float  # submission to first token
    text: str


def add_command(commands: Any) -> None:
    """Add `ask` to the subparsers of `python -m replica`."""
    parser = commands.add_parser(
        "ask",
        help="two questions about one table, with and without its blocks in the cache",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="tiny", help='"tiny", a local folder or a hub id (default: tiny)')
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    parser.add_argument(
        "--max-tokens", type=_positive, default=24, help="longest answer, in tokens (default: 24)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Load, ask twice, print. Raises ConfigError and RequestRefused."""
    console = Console()
    config = ReplicaConfig(model=options.model, device=options.device)
    with _progress(console) as progress:
        task = progress.add_task(f"loading {options.model}")
        assembly = assemble(config)
        try:
            core = assembly.core()
            progress.update(task, description=f"warming up on {assembly.runner.info.device}")
            core.warm_up()
            answers = []
            for number, question in enumerate(sample_table.questions()[:2], start=1):
                progress.update(task, description=f"question {number} of 2: {question.text}")
                request = _request(assembly, question, number, options.max_tokens)
                answers.append(ask(core, request, question.text))
        finally:
            assembly.runner.close()
    console.print(render(answers))
    console.print(verdict(*answers))


def ask(
    core: EngineCore, request: GenerateRequest, question: str, clock: Callable[[], float] = time.perf_counter
) -> Answer:
    """Run one request to its end on an otherwise idle engine. Raises what it ends with."""
    began_s = clock()
    taken = core.submit(request)
    first_s: float | None = None
    while taken.finish_reason is None:
        for progress in core.step():
            if progress.error is not None:
                raise progress.error
        if first_s is None and taken.num_output_tokens:
            first_s = clock()
    assert first_s is not None, "a finished request has at least one token"
    return Answer(
        question=question,
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=taken.cached_tokens or 0,
        ttft_s=first_s - began_s,
        text=taken.detokenizer.take(),
    )


def render(answers: list[Answer]) -> Table:
    """The answers as a table for a terminal."""
    table = Table(title="Two questions about one table")
    table.add_column("question")
    for name in ("prompt tokens", "cached tokens", "time to first token"):
        table.add_column(name, justify="right")
    table.add_column("generated text")
    for answer in answers:
        table.add_row(
            answer.question,
            str(answer.prompt_tokens),
            str(answer.cached_tokens),
            f"{1000 * answer.ttft_s:.1f} ms",
            Text(_snippet(answer.text)),  # not markup, whatever brackets a model writes
        )
    return table


def verdict(first: Answer, second: Answer) -> str:
    """One sentence: what the cache did for the second question."""
    share = second.cached_tokens / second.prompt_tokens
    return (
        f"The second question found {share:.0%} of its prompt in the cache; "
        f"its first token came {first.ttft_s / second.ttft_s:.1f} times as fast."
    )


def _request(
    assembly: Assembly, question: sample_table.Question, number: int, max_tokens: int
) -> GenerateRequest:
    try:
        token_ids = pack_tokens(_tokenize(assembly.tokenizer, sample_table.prompt(question)))
    except jinja2.TemplateError as error:
        at = f"line {error.lineno} of " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ModelRefused(assembly.model.source, f"{at}its chat template cannot be used: {error}") from error
    return GenerateRequest(
        request_id=RequestId(f"ask-{number}"),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        seed=0,
    )


def _tokenize(tokenizer: Any, text: str) -> list[int]:
    """As a chat where the model has a chat template, else as plain text."""
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _snippet(text: str) -> str:
    flat = "".join(c if c.isprintable() else " " for c in text)
    flat = " ".join(flat.split())
    return flat if len(flat) <= SNIPPET_CHARS else flat[: SNIPPET_CHARS - 1] + "…"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value
