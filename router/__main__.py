"""`python -m router`: ask a Router why a request went where it went and what would help; make keys."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Literal

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from cache.counted import counted
from cache.errors import ConfigError
from router.insight.advice import Advice, advise, hit_ratio
from router.insight.debug_client import (
    TOKEN_VARIABLE,
    Asked,
    CannotAsk,
    ask,
    ask_all,
    ask_for,
    open_client,
)
from router.insight.debug_view import MAX_LAST, DebugPage, RequestView, ShadowTotalsView, SummaryView
from router.insight.explanation import explain, seconds
from router.tenants.api_key import digest_of, new_key, new_secret
from router.tenants.key_table import parse_keys

DESCRIPTION = """\
explain  one request in words: who could have taken it, what each held of its prompt, what each would have
         cost, why it went where it went, and what the engine found then. Without an id: the latest requests.
advise   what would raise the hit rate, ranked by the tokens each cause costs.
key      a new API key and what goes into the key file for it. Asks nobody, writes nothing.

explain and advise ask the Router at --url for /debug/route, which is off unless deploy.yaml says, under
args.router,
    expose_debug: true
They see request ids and numbers, never a prompt.

examples:
  python -m router explain                              the latest requests, one line each
  python -m router explain chatcmpl-6f1c2a90b7d44e52    by the id in an answer
  python -m router explain my-trace-17                  by the x-request-id the client sent
  python -m router advise --url http://10.0.0.5:8000
  python -m router key alice-laptop --tenant alice
"""

URL_VARIABLE = "WARMPATH_URL"
DEFAULT_URL = "http://127.0.0.1:8000"
_UNBOUNDED = 10_000  # characters of a line
_LEAST_TOLD_S = 0.00005  # a mean below it would read as 0.0 ms
INTERRUPTED = 130  # exit status, as shells have it for Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: it could not be asked, and why is told; `INTERRUPTED`: Ctrl-C."""
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False, emoji=False)  # a ":key:" in a request's id is no picture
    if arguments.command == "key":
        _new_key(console, arguments)
        return 0
    try:
        with open_client(arguments.url, arguments.token) as client:
            if arguments.command == "advise":
                _advise(console, *ask_all(client))
            elif arguments.request_id is None:
                _list(console, ask(client, last=arguments.last))
            else:
                _explain(console, ask_for(client, arguments.request_id))
    except CannotAsk as error:
        Console(stderr=True, highlight=False).print(f"[bold red]{escape(str(error))}[/]", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        Console(stderr=True, highlight=False).print("Stopped.")
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m router", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="explain | advise | key")
    explaining = commands.add_parser(
        "explain",
        help="one request in words, or the latest ones",
        description="One request's decision in words; without an id, the latest requests, one line each.",
    )
    explaining.add_argument(
        "request_id",
        nargs="?",
        help="id of an answer (chatcmpl-…, cmpl-…), or the x-request-id a client sent",
    )
    explaining.add_argument(
        "--last", type=_count, default=20, help="without an id: how many requests to list (default 20)"
    )
    advising = commands.add_parser(
        "advise",
        help="what would raise the hit rate",
        description="What would raise the hit rate, ranked by the tokens each cause costs. "
        "Sums are of all Routers at the address, each since its start.",
    )
    for command in (explaining, advising):
        command.add_argument(
            "--url",
            default=os.environ.get(URL_VARIABLE, DEFAULT_URL),
            help=f"where the server listens (default: ${URL_VARIABLE}, or {DEFAULT_URL})",
        )
        command.add_argument(
            "--token",
            default=os.environ.get(TOKEN_VARIABLE),
            help=f"debug_token of deploy.yaml, or an operator's API key (default: ${TOKEN_VARIABLE})",
        )
    _add_key_command(commands)
    return parser


def _add_key_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    making = commands.add_parser(
        "key",
        help="a new API key, and its entry in the key file",
        description="A new API key, and its entry in the key file, which holds no key but its SHA-256.",
    )
    making.add_argument("name", nargs="?", default="new-key", help="unique in the file; in logs")
    making.add_argument("--tenant", help="whose cached prefixes it shares (default: the name)")
    making.add_argument("--operator", action="store_true", help="may also read /metrics, /debug and the like")
    making.add_argument(
        "--secret", action="store_true", help="instead: a secret for `tenants.secret_file`, nothing else"
    )


def _count(text: str) -> int:
    accepted = argparse.ArgumentTypeError(f"must be a whole number between 1 and {MAX_LAST}")
    try:
        value = int(text)
    except ValueError:
        raise accepted from None
    if not 1 <= value <= MAX_LAST:
        raise accepted
    return value


# --- making keys ----------------------------------------------------------------------------------


def _new_key(console: Console, arguments: argparse.Namespace) -> None:
    if arguments.secret:
        console.print(new_secret(), markup=False, soft_wrap=True)
        return
    key = new_key()
    lines = [f"  - {_setting('name', arguments.name)}"]
    if arguments.tenant is not None:
        lines.append(f"    {_setting('tenant', arguments.tenant)}")
    lines.append(f'    sha256: "{digest_of(key.encode()).hex()}"')
    if arguments.operator:
        lines.append("    operator: true")
    try:
        parse_keys("\n".join(["keys:", *lines]))
    except ConfigError as error:
        field = error.field.rpartition(".")[2]
        raise SystemExit(f"{field} = {error.value!r}: {error.accepted}") from None
    # Nothing is wrapped: a key cut in two by a narrow terminal is another one once it is copied.
    told = f"The key, for its user alone; it is shown only now:\n\n{key}\n"
    console.print(told, markup=False, soft_wrap=True)
    console.print("Under `keys:` in the key file:\n", markup=False)
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def _setting(name: str, value: str) -> str:
    """A line of YAML: in quotes where it would not be read as text, such as 42 or no."""
    return yaml.safe_dump({name: value}, width=1000).rstrip("\n")


# --- showing --------------------------------------------------------------------------------------


def _explain(console: Console, page: DebugPage) -> None:
    [request] = page.requests
    console.print(f"[bold]{request.request_id}[/]", soft_wrap=True)
    for paragraph in explain(request):
        console.print(f"\n{paragraph}")
    console.print()
    console.print(_candidates(request))
    if hidden := request.num_candidates - len(request.candidates):
        console.print(f"and {hidden} more")


def _candidates(request: RequestView) -> Table:
    table = _table("what the decision saw, best first")
    for name in ("replica", "cached", "running", "waiting", "queued", "ahead", "prefill", "cost"):
        table.add_column(name, justify="left" if name == "replica" else "right", no_wrap=True)
    for candidate in request.candidates:
        terms = candidate.terms
        table.add_row(
            candidate.replica,
            f"{candidate.cached_tokens:,}" if candidate.is_matched else "unknown",
            str(candidate.num_running),
            str(candidate.num_waiting),
            f"{candidate.queued_tokens:,}",
            seconds(terms.backlog_s) if terms is not None else "",
            seconds(terms.prefill_s) if terms is not None else "",
            seconds(terms.total_s) if terms is not None else _plain(candidate.cost),
        )
    return table


def _list(console: Console, page: DebugPage) -> None:
    if not page.requests:
        console.print("This Router has had no request yet.")
        return
    table = _table(f"latest requests of Router {page.summary.router}, newest first")
    for name in ("request", "reason", "replica", "prompt", "cached", "first token"):
        right = name in ("prompt", "cached", "first token")
        justify: Literal["left", "right"] = "right" if right else "left"
        table.add_column(name, justify=justify, no_wrap=True)
    for request in page.requests:
        outcome = request.outcome
        table.add_row(
            request.request_id,
            request.reason,
            outcome.replica if outcome is not None else request.candidates[0].replica,
            f"{request.prompt_tokens:,}",
            f"{outcome.delivered:,}" if outcome is not None else "",
            seconds(request.first_token_s) if request.first_token_s is not None else "",
        )
    # An id in two pieces cannot be copied: lines that are too wide are left to the terminal.
    table.width = Measurement.get(console, console.options.update(width=_UNBOUNDED), table).maximum
    console.print(table, soft_wrap=True)
    console.print("python -m router explain <request> says why in words")


def _advise(console: Console, summary: SummaryView, asked: Asked) -> None:
    totals = summary.totals
    left_out = ": the sums leave the others out" if asked.num_missing else ""
    console.print(f"{asked} answered{left_out}.")
    if not totals.requests:
        console.print("No request has been answered yet: there is nothing to go by.")
        return
    console.print(
        f"{counted(totals.requests, 'request')}, {counted(totals.prompt, 'prompt token')}: "
        f"{totals.delivered:,} ({hit_ratio(totals):.1%}) came from caches. "
        f"{totals.available:,} were cached somewhere, {totals.captured:,} where they were sent."
    )
    console.print(_reasons(summary))
    found = advise(summary)
    if not found:
        console.print("Nothing to change is worth half a percent of the prompt tokens.")
    for number, advice in enumerate(found, start=1):
        _show(console, number, advice, totals.prompt)
    if summary.shadow is not None:
        console.print(f"\n{_shadow(summary)}")


def _reasons(summary: SummaryView) -> Table:
    table = _table("why the others were computed")
    for name in ("reason", "tokens", "of the prompts"):
        table.add_column(name, justify="left" if name == "reason" else "right")
    ordered = sorted(summary.totals.uncached.items(), key=lambda item: -item[1])
    for reason, count in ordered:
        table.add_row(reason.replace("_", " "), f"{count:,}", f"{count / summary.totals.prompt:.1%}")
    return table


def _show(console: Console, number: int, advice: Advice, prompt: int) -> None:
    worth = f"at most {advice.tokens:,} tokens ({advice.tokens / prompt:.1%})"
    console.print(f"\n[bold]{number}. {advice.title}[/]: {worth}")
    console.print(f"   seen: {advice.evidence}")
    console.print(f"   do:   {advice.change}")


def _shadow(summary: SummaryView) -> str:
    shadow = summary.shadow
    assert shadow is not None
    if shadow.failed:
        return f"The shadow policy {shadow.policy} failed and was switched off; the log says how."
    decisions = shadow.agreed + shadow.disagreed
    if not decisions:
        return f"The shadow policy {shadow.policy} has decided nothing yet."
    return (
        f"The shadow policy {shadow.policy} disagreed with {summary.policy} in "
        f"{shadow.disagreed / decisions:.0%} of {counted(decisions, 'decision')}; {_compared(shadow)}."
    )


def _compared(shadow: ShadowTotalsView) -> str:
    if shadow.disagreed and not shadow.priced:
        return "what its choices cost is not known, since replicas' speeds were not yet"
    mean_s = (shadow.extra_s - shadow.saved_s) / (shadow.agreed + shadow.priced)
    if abs(mean_s) < _LEAST_TOLD_S:
        return "by the live cost model its choices cost the same"
    dearer = "dearer" if mean_s > 0 else "cheaper"
    return f"by the live cost model its choices are {seconds(abs(mean_s))} {dearer} per request"


def _plain(cost: float | None) -> str:
    return "" if cost is None else f"{cost:,.3g}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)


if __name__ == "__main__":
    sys.exit(main())
