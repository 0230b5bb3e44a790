"""`make demo`: the same questions about one long table, under round robin and under prefix-aware routing.

Talks HTTP to a running server; knows nothing of how it places requests beyond what its headers say.
Each arm of each round has a cache salt of its own, so neither sees what the other left in the caches.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import httpx
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from replica.output.sample_table import Question, prompt, questions

ARMS = ("round_robin", "expected_time")
TITLES = {"round_robin": "round robin", "expected_time": "prefix-aware"}
KEY_VARIABLE = "OPENAI_API_KEY"

DESCRIPTION = """\
Asks several questions about one long markdown table (thirty people). The answers differ, the table does
not: a replica that has computed it once only computes the question. Round robin sends the next question
to the other replica; prefix-aware routing sends it where the table is. Needs a running server with
`expose_routing: true` (the deploy.yaml of `make serve` has it).
"""


class DemoError(Exception):
    """The demo cannot run or cannot mean anything; says what to do."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer, as the client saw it."""

    ttft_s: float  # request sent -> first token's text
    cached_tokens: int  # the engine's count, from `usage`
    prompt_tokens: int
    replica: str


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False)
    try:
        headers = {} if arguments.key is None else {"authorization": f"Bearer {arguments.key}"}
        with httpx.Client(base_url=arguments.url, timeout=arguments.timeout_s, headers=headers) as client:
            model = _served_model(client)
            rounds = _ask_all(client, model, arguments, console)
    except DemoError as error:
        Console(stderr=True).print(f"[bold red]demo:[/] {error}", soft_wrap=True)
        return 1
    console.print(_table(rounds, arguments.questions))
    console.print(_summary(rounds), soft_wrap=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.demo",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, kind, default, text in (
        ("--url", str, "http://127.0.0.1:8000", "where the server listens"),
        ("--questions", _positive, 4, "questions per round"),
        ("--rounds", _positive, 3, "repetitions; the two policies take turns in going first"),
        ("--max-tokens", _positive, 8, "length of an answer, tokens"),
        ("--timeout-s", float, 120.0, "for one answer, seconds"),
    ):
        parser.add_argument(name, type=kind, default=default, help=f"{text} (default {default})")
    parser.add_argument(
        "--key", default=os.environ.get(KEY_VARIABLE), help=f"API key, if needed (default: ${KEY_VARIABLE})"
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _served_model(client: httpx.Client) -> str:
    try:
        answer = client.get("/v1/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.UNAUTHORIZED:
            raise DemoError(f"{client.base_url} answered {error.response.status_code}") from None
        raise DemoError(f"the server wants an API key: give --key, or set {KEY_VARIABLE}") from None
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise DemoError(
            f"no server answers at {client.base_url} ({error}); start one with `make serve`"
        ) from None


Rounds = dict[str, list[list[Answer]]]  # arm -> round -> question


def _ask_all(client: httpx.Client, model: str, arguments: argparse.Namespace, console: Console) -> Rounds:
    asked = [questions()[index % len(questions())] for index in range(arguments.questions)]
    rounds: Rounds = {arm: [] for arm in ARMS}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("asking", total=arguments.rounds * len(ARMS) * len(asked))
        for number in range(arguments.rounds):
            for arm in ARMS if number % 2 == 0 else reversed(ARMS):  # neither is always first
                progress.update(task, description=f"round {number + 1}, {TITLES[arm]}")
                salt = uuid.uuid4().hex
                answers = []
                for question in asked:
                    answers.append(_ask(client, model, question, arm, salt, arguments.max_tokens))
                    progress.advance(task)
                rounds[arm].append(answers)
    return rounds


def _ask(
    client: httpx.Client, model: str, question: Question, policy: str, salt: str, max_tokens: int
) -> Answer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt(question)}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first_s: float | None = None
    usage = None
    sent = time.perf_counter()
    headers = {"x-warmpath-policy": policy}
    with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        if answer.status_code != httpx.codes.OK:
            raise DemoError(f"the server answered {answer.status_code}: {answer.read().decode()}")
        for chunk in _chunks(answer):
            if first_s is None and chunk.get("choices"):
                first_s = time.perf_counter() - sent
            usage = chunk.get("usage") or usage
    replica = answer.headers.get("x-warmpath-replica")
    if replica is None:
        raise DemoError(
            "no x-warmpath-replica header: in deploy.yaml, under `router`, set expose_routing: true"
        )
    if first_s is None or usage is None:
        raise DemoError("the stream ended without a token or without usage")
    return Answer(first_s, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"], replica)


def _chunks(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The stream's JSON chunks; a stream that does not end in [DONE] is an error."""
    for line in answer.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            chunk: dict[str, Any] = json.loads(line[len("data: ") :])
            if "error" in chunk:
                raise DemoError(f"the stream failed: {chunk['error']}")
            yield chunk
    raise DemoError("the stream was cut before [DONE]")


def _table(rounds: Rounds, num_questions: int) -> Table:
    prompt_tokens = rounds[ARMS[0]][0][0].prompt_tokens
    title = (
        f"{num_questions} questions about one table of {prompt_tokens} tokens, {len(rounds[ARMS[0]])} rounds"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("\nround", justify="right", no_wrap=True)
    table.add_column("\nask", justify="right", no_wrap=True)
    for arm in ARMS:
        table.add_column(f"{TITLES[arm]}\nTTFT ms", justify="right", no_wrap=True)
        table.add_column("\ncached", justify="right", no_wrap=True)
        table.add_column("\nreplica", no_wrap=True)
    for number, pair in enumerate(zip(*(rounds[arm] for arm in ARMS), strict=True), start=1):
        for index, answers in enumerate(zip(*pair, strict=True), start=1):
            cells = [cell for answer in answers for cell in _cells(answer)]
            table.add_row(str(number), str(index), *cells, end_section=index == num_questions)
    means = [cell for arm in ARMS for cell in (_ms(_mean_ttft_s(rounds[arm])), _mean_cached(rounds[arm]), "")]
    table.add_row("mean", "", *means, style="bold")
    return table


def _cells(answer: Answer) -> tuple[str, str, str]:
    return _ms(answer.ttft_s), str(answer.cached_tokens), answer.replica


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"


def _mean_ttft_s(answers: list[list[Answer]]) -> float:
    return mean(answer.ttft_s for each in answers for answer in each)


def _mean_cached(answers: list[list[Answer]]) -> str:
    return f"{mean(answer.cached_tokens for each in answers for answer in each):.0f}"


def _summary(rounds: Rounds) -> str:
    robin, aware = (_mean_ttft_s(rounds[arm]) for arm in ARMS)
    ratios = [
        mean(answer.ttft_s for answer in one) / mean(answer.ttft_s for answer in other)
        for one, other in zip(rounds["round_robin"], rounds["expected_time"], strict=True)
    ]
    return (
        f"mean time to first token: round robin {_ms(robin)} ms, prefix-aware {_ms(aware)} ms; "
        f"ratio per round: median {median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
