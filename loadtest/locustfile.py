"""Locust users for the workloads that prefix caching lives on, against any OpenAI-compatible server.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000                       # locust's web page
    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000 Chat Agent --headless -u 8 -t 1m
    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000 --processes 4 --headless -u 64 -t 5m

A closed loop: a user asks, reads to the end, thinks, asks again, so a slow server is asked less.
docs/benchmarking.md says what that hides, and `python -m loadtest replay` does not.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import gevent  # type: ignore[import-untyped]
import psutil  # type: ignore[import-untyped]
from locust import events
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from loadtest.client.asking import TIMEOUT_HELP
from loadtest.client.endpoint import KEY_VARIABLE, Endpoint
from loadtest.client.errors import ClientError
from loadtest.placement import arguments as read
from loadtest.users.counts import Counts
from loadtest.users.llm_user import COUNTS, LlmUser, Setting

DEFAULT_HOST = "http://127.0.0.1:8000"
_JOIN_LIMIT_S = 10.0  # for workers that are on their way while the master finds out that there is no server
_SETTLE_S = 0.5  # a worker says that it is ready before it has set up what it reports
_LEAVE_LIMIT_S = 2.0  # for those that were told to go
_REPORT_KEY = "llm_counts"
_total = Counts()  # of all workers

logging.getLogger("httpx").setLevel(logging.WARNING)  # locust shows INFO, which is a line per request


class LongDocuments(LlmUser):
    """Several questions about one long document that others read too."""

    scenario_name = "long_documents"


class Chat(LlmUser):
    """Chats behind a few system prompts, with the model's own answers in their history."""

    scenario_name = "chat"
    weight = 3


class FewShot(LlmUser):
    """New cases behind the same three or five examples."""

    scenario_name = "few_shot"


class SelfConsistency(LlmUser):
    """Several samples of one question, and a vote."""

    scenario_name = "self_consistency"


class TreeOfThought(LlmUser):
    """Branches, scores, prunes."""

    scenario_name = "tree_of_thought"


class Retrieval(LlmUser):
    """Passages of 512 tokens, a few of them in every other prompt."""

    scenario_name = "retrieval"


class Agent(LlmUser):
    """Tool calls in quick succession."""

    scenario_name = "agent"


class NoSharing(LlmUser):
    """Adverse: nothing is shared."""

    scenario_name = "no_sharing"


class HotSystemPrompt(LlmUser):
    """Adverse: one long system prompt that nearly everybody has."""

    scenario_name = "hot_system_prompt"


class DecodeHeavy(LlmUser):
    """Adverse: short prompts, long answers."""

    scenario_name = "decode_heavy"


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument  # a group's would not know secrets
    add("--api-key", default="", is_secret=True, help=f"API key (default: ${KEY_VARIABLE})")
    add("--model-name", default="", help="model to ask for (default: the first that the server lists)")
    add("--timeout-s", type=read.positive_seconds, default=300.0, help=TIMEOUT_HELP)
    add("--scale", type=read.load, default=1.0, help="of prompts' and answers' lengths: 0.1 for tiny models")
    add("--pauses", type=read.seconds, default=1.0, help="of pauses inside sessions: 0 for none")
    add("--seed", type=int, default=0, help="of everything drawn: equal seeds ask equal questions")


@events.init.add_listener  # type: ignore[untyped-decorator]
def _find_server(environment: Environment, **_: Any) -> None:
    """Before anybody asks: a wrong address or key is one line and status 1, not a table of failures.

    The master looks for its workers: it knows the address, ends all of them, and what it says is seen. Where
    there is a web page, whoever starts the run names the address there.
    """
    runner = environment.runner
    if environment.web_ui is None and environment.parsed_options is not None:
        if isinstance(runner, WorkerRunner):
            return
        try:
            _setting(environment)
        except ClientError as error:
            if isinstance(runner, MasterRunner):
                _dismiss_workers(runner, environment.parsed_options.expect_workers)
            raise SystemExit(f"locustfile: {error}") from None


def _dismiss_workers(runner: MasterRunner, num_expected: int) -> None:
    """A worker that has not joined cannot be told, and one that is told while it still joins goes on and
    hears nothing any more, or sends a report that locust answers with a traceback: those that this process
    has started are given a moment, and are ended if they stay."""
    with gevent.Timeout(_JOIN_LIMIT_S, False):
        while len(runner.clients.ready) < num_expected:
            gevent.sleep(0.1)
    gevent.sleep(_SETTLE_S)
    runner.quit()
    started = psutil.Process().children()
    with gevent.Timeout(_LEAVE_LIMIT_S, False):
        while any(map(_is_alive, started)):
            gevent.sleep(0.1)
    for worker in filter(_is_alive, started):
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.terminate()


def _is_alive(process: psutil.Process) -> bool:
    """One that has ended is locust's to wait for."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def _begin(environment: Environment, **_: Any) -> None:
    """The web page may have changed the address and options since; what is wrong is among its failures."""
    _total.take()
    COUNTS.take()
    if isinstance(environment.runner, MasterRunner):
        return  # it asks nobody
    try:
        LlmUser.setting = _setting(environment)
    except (ClientError, argparse.ArgumentTypeError) as error:
        LlmUser.setting = None
        environment.stats.log_error("CONNECT", environment.host or DEFAULT_HOST, str(error))


def _setting(environment: Environment) -> Setting:
    """Raises ClientError, and ArgumentTypeError for what the web page lets through."""
    options = environment.parsed_options
    assert options is not None, "locust sets them before any event"
    return Setting(
        endpoint=Endpoint.find(
            environment.host or DEFAULT_HOST, key=options.api_key or None, model=options.model_name or None
        ),
        timeout_s=_checked("--timeout-s", read.positive_seconds, options.timeout_s),
        scale=_checked("--scale", read.load, options.scale),
        pauses=_checked("--pauses", read.seconds, options.pauses),
        seed=options.seed,
        worker=environment.runner.worker_index if isinstance(environment.runner, WorkerRunner) else 0,
    )


def _checked(name: str, reader: Callable[[str], float], value: float) -> float:
    try:
        return reader(str(value))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error}") from None


@events.report_to_master.add_listener  # type: ignore[untyped-decorator]
def _send(client_id: str, data: dict[str, Any]) -> None:
    data[_REPORT_KEY] = COUNTS.take()


@events.worker_report.add_listener  # type: ignore[untyped-decorator]
def _receive(client_id: str, data: dict[str, Any]) -> None:
    _total.merge(data.get(_REPORT_KEY) or {})


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def _say(environment: Environment, **_: Any) -> None:
    """Cached tokens, replicas and ends, below locust's own tables."""
    if isinstance(environment.runner, WorkerRunner):
        return
    _total.merge(COUNTS.take())
    if _total.by_scenario:
        print("\n" + "\n".join(_total.lines()) + "\n")  # noqa: T201  # as locust prints its tables
