"""`python -m router`: ask a Router why a request went where it went and what would help; make keys."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Literal

import httpx
import msgspec
import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from cache.counted import counted
from cache.errors import ConfigError, ServingError
from cache.header_text import fits_header
from router.insight.advice import Advice, advise, hit_ratio
from router.insight.debug_view import (
    FORMAT_VERSION,
    MAX_LAST,
    DebugPage,
    RequestView,
    ShadowTotalsView,
    SummaryView,
    merged,
)
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

URL_VARIABLE, TOKEN_VARIABLE = "WARMPATH_URL", "WARMPATH_DEBUG_TOKEN"
DEFAULT_URL = "http://127.0.0.1:8000"
# Answers in a row from Routers heard before after which there are no others; so many times the number of
# Routers where one that is known of is missing, which chance alone leaves out once in 3000 times then.
_REPEATS = 8
_TIMEOUT_S = 10.0
_UNBOUNDED = 10_000  # characters of a line
_LEAST_TOLD_S = 0.00005  # a mean below it would read as 0.0 ms
INTERRUPTED = 130  # exit status, as shells have it for Ctrl-C


class CannotAsk(ServingError):
    """The Router could not be asked or does not know; the message says what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False, emoji=False)  # a ":key:" in a request's id is no picture
    if arguments.command == "key":
        _new_key(console, arguments)
        return 0
    try:
        with _client(arguments.url, arguments.token) as client:
            if arguments.command == "advise":
                _advise(console, *_ask_all(client))
            elif arguments.request_id is None:
                _list(console, _ask(client, last=arguments.last))
            else:
                _explain(console, _ask_for(client, arguments.request_id))
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


# --- asking ---------------------------------------------------------------------------------------


def _client(url: str, token: str | None) -> httpx.Client:
    headers = {"connection": "close"}  # a new connection may reach another Router
    if token is not None:
        if not fits_header(token):
            # Said here, without the token: httpx shows the whole header, as if no server were there.
            raise CannotAsk(
                f"the token (--token, or {TOKEN_VARIABLE}) cannot be sent: it has a line end, a space before "
                "or after it, or a character that is not ASCII"
            )
        headers["authorization"] = f"Bearer {token}"
    try:
        return httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S)
    except httpx.InvalidURL as error:
        raise CannotAsk(f"--url {url} is not an address: {error}") from None


def _ask(client: httpx.Client, **query: str | int) -> DebugPage:
    """The page. Raises CannotAsk."""
    try:
        answer = client.get("/debug/route", params=query)
    except (httpx.HTTPError, UnicodeError) as error:  # the latter of a name that cannot be looked up
        raise CannotAsk(
            f"no server answers at {client.base_url} ({error}): "
            "start one with `make serve`, or name it with --url"
        ) from None
    if answer.status_code != httpx.codes.OK:
        raise _refused(answer)
    try:
        page = msgspec.json.decode(answer.content, type=DebugPage)
    except msgspec.MsgspecError as error:
        raise CannotAsk(f"what answers at {client.base_url} is no Router of this version ({error})") from None
    if page.version != FORMAT_VERSION:
        raise CannotAsk(f"the Router's page has version {page.version}; this command reads {FORMAT_VERSION}")
    return page


class _Asked:
    """Which of the Routers behind one address have answered: each connection reaches one by chance."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._num_said = 1  # what they say of their number
        self._num_known = 0  # answers in a row from Routers heard before

    def answered(self, router: str, num_routers: int) -> None:
        self._num_known = self._num_known + 1 if router in self._names else 0
        self._names.add(router)
        self._num_said = num_routers

    @property
    def num_missing(self) -> int:
        return max(0, self._num_said - len(self._names))

    @property
    def is_enough(self) -> bool:
        """All have answered, or the others cannot be reached. All they know of is not all where two
        deployments have one address."""
        return self._num_known >= _REPEATS * (self._num_said if self.num_missing else 1)

    def __str__(self) -> str:
        if self.num_missing:
            return f"{len(self._names)} of {self._num_said} Routers"
        return "1 Router" if len(self._names) == 1 else f"{len(self._names)} Routers"


def _ask_for(client: httpx.Client, request_id: str) -> DebugPage:
    """The page of one request, from whichever Router remembers it. Raises CannotAsk."""
    asked = _Asked()
    while not asked.is_enough:
        try:
            return _ask(client, request_id=request_id)
        except _Forgotten as error:
            asked.answered(error.router, error.num_routers)
    raise CannotAsk(
        f"{request_id} is not remembered ({asked} asked). Give the id of an answer or the x-request-id that "
        "was sent; only the latest requests are kept (debug_requests), and none that was refused before it "
        "had a replica (429, 503): warmpath_requests_total counts those."
    )


def _ask_all(client: httpx.Client) -> tuple[SummaryView, _Asked]:
    """The sums of every Router behind the address that can be reached, and who answered. Raises CannotAsk."""
    found: dict[str, SummaryView] = {}
    asked = _Asked()
    while not asked.is_enough:
        summary = _ask(client, last=0).summary
        asked.answered(summary.router, summary.num_routers)
        found[summary.router] = summary
    return merged(list(found.values())), asked


def _refused(answer: httpx.Response) -> CannotAsk:
    """What an error answer means here."""
    try:
        error = answer.json()["error"]
        code, message = error["code"], error["message"]
    except (ValueError, KeyError, TypeError):
        code, message = None, answer.text[:200]
    if code == "request_not_found":
        num_routers = answer.headers.get("x-warmpath-routers", "")
        return _Forgotten(
            answer.headers.get("x-warmpath-router", ""), int(num_routers) if num_routers.isdecimal() else 1
        )
    if code == "unknown_url":
        return CannotAsk("/debug/route is off: in deploy.yaml, under args.router, set expose_debug: true")
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        wanted = "its debug_token, or an operator's API key"
        return CannotAsk(f"the Router asks for {wanted}: give --token, or set {TOKEN_VARIABLE}")
    if answer.status_code == httpx.codes.FORBIDDEN:
        return CannotAsk("that API key opens the API only; this page needs an operator's")
    return CannotAsk(f"the server answered {answer.status_code}: {message}")


class _Forgotten(CannotAsk):
    """One Router does not remember the request; another may."""

    def __init__(self, router: str, num_routers: int) -> None:
        super().__init__(f"Router {router} does not remember the request")
        self.router = router
        self.num_routers = num_routers  # that it knows of


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


def _advise(console: Console, summary: SummaryView, asked: _Asked) -> None:
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
