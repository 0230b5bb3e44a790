"""`make demo`: the same questions about one long table, under round robin and under prefix-aware routing.

Talks HTTP to a running server; knows nothing of how it places requests beyond what its headers say.
Each arm of each round has a cache salt of its own, so neither sees what the other left in the caches.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

import httpx
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cache.counted import counted
from loadtest.client.answer import REPLICA_HEADER, Answer
from loadtest.client.asking import TIMEOUT_HELP, Asker
from loadtest.client.endpoint import KEY_VARIABLE, Endpoint
from loadtest.client.errors import ClientError, Unreachable
from loadtest.client.question import Message, Question, chat
from replica.output.sample_table import Question as TableQuestion
from replica.output.sample_table import prompt, questions

ARMS = ("round_robin", "expected_time")
TITLES = {"round_robin": "round robin", "expected_time": "prefix-aware"}

STOPPED = 130  # as a shell reports Ctrl-C
_MAX_TIMEOUT_S = 1e6  # sockets take no more than some years

DESCRIPTION = """\
Asks several questions about one long markdown table (thirty people). The answers differ, the table does
not: a replica that has computed it once only computes the question. Round robin sends the next question
to the other replica; prefix-aware routing sends it where the table is. Needs a running server with
`expose_routing: true` (the deploy.yaml of `make serve` has it).

examples
  make demo
  python -m loadtest.demo --url http://127.0.0.1:8000 --questions 8 --rounds 5
"""


class DemoError(Exception):
    """The demo cannot run or cannot mean anything; says what to do."""


@dataclass(frozen=True, slots=True)
class Row:
    """What the table tells of one streamed answer."""

    ttft_s: float  # request sent -> first token's text
    cached_tokens: int  # the engine's count, from `usage`
    prompt_tokens: int
    replica: str


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False)
    try:
        asker = Asker(_endpoint(arguments), arguments.timeout_s)
        with contextlib.closing(asker):
            rounds = _ask_all(asker, arguments, console)
    except (DemoError, ClientError) as error:
        # As Text: what a server says may have brackets, which are no styles of rich's.
        Console(stderr=True).print(Text.assemble(("demo:", "bold red"), f" {error}"), soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped")
        return STOPPED
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
        ("--timeout-s", _seconds, 120.0, f"{TIMEOUT_HELP}, seconds"),
    ):
        parser.add_argument(name, type=kind, default=default, help=f"{text} (default {default})")
    parser.add_argument("--key", help=f"API key, if needed (default: ${KEY_VARIABLE})")
    return parser


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < _MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and below {_MAX_TIMEOUT_S:,.0f}")
    return value


def _endpoint(arguments: argparse.Namespace) -> Endpoint:
    """Raises DemoError, KeyNeeded."""
    try:
        return Endpoint.find(arguments.url, key=arguments.key)
    except Unreachable as error:
        raise DemoError(f"{error}; start one with `make serve`") from None


Rounds = dict[str, list[list[Row]]]  # arm -> round -> question


def _ask_all(asker: Asker, arguments: argparse.Namespace, console: Console) -> Rounds:
    asked = [questions()[index % len(questions())] for index in range(arguments.questions)]
    rounds: Rounds = {arm: [] for arm in ARMS}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("asking", total=arguments.rounds * len(ARMS) * len(asked))
        for number in range(arguments.rounds):
            for arm in ARMS if number % 2 == 0 else reversed(ARMS):  # neither is always first
                progress.update(task, description=f"round {number + 1}, {TITLES[arm]}")
                salt = uuid.uuid4().hex
                rows = []
                for question in asked:
                    rows.append(_row(asker.ask(_asked(question, arm, salt, arguments.max_tokens))))
                    progress.advance(task)
                rounds[arm].append(rows)
    return rounds


def _asked(about: TableQuestion, policy: str, salt: str, max_tokens: int) -> Question:
    message: Message = {"role": "user", "content": prompt(about)}
    question = chat([message], max_tokens=max_tokens, temperature=0, ignore_eos=True, cache_salt=salt)
    return replace(question, headers={"x-warmpath-policy": policy})


def _row(answer: Answer) -> Row:
    """Raises DemoError for an answer that tells nothing."""
    if answer.failure is not None:
        status = "" if answer.status in (None, httpx.codes.OK) else f" ({answer.status})"
        raise DemoError(f"an answer failed: {answer.failure}{status}: {answer.problem}")
    if answer.replica is None:
        raise DemoError(
            f"no {REPLICA_HEADER} header: in deploy.yaml, under `router`, set expose_routing: true"
        )
    if answer.ttft_s is None or answer.cached_tokens is None or answer.prompt_tokens is None:
        raise DemoError("an answer ended without a token or without usage")
    return Row(answer.ttft_s, answer.cached_tokens, answer.prompt_tokens, answer.replica)


def _table(rounds: Rounds, num_questions: int) -> Table:
    prompt_tokens = rounds[ARMS[0]][0][0].prompt_tokens
    times = counted(len(rounds[ARMS[0]]), "round")
    title = f"{counted(num_questions, 'question')} about one table of {prompt_tokens} tokens, {times}"
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


def _cells(answer: Row) -> tuple[str, str, str]:
    # Escaped: what a server says may have brackets, which are no styles of rich's.
    return _ms(answer.ttft_s), str(answer.cached_tokens), escape(answer.replica)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"


def _mean_ttft_s(answers: list[list[Row]]) -> float:
    return mean(answer.ttft_s for each in answers for answer in each)


def _mean_cached(answers: list[list[Row]]) -> str:
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
