"""`python -m router`: what it prints, and what it says when it cannot."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import msgspec
import pytest

from router import __main__ as command
from router.insight.debug_client import TOKEN_VARIABLE
from router.insight.debug_view import (
    FORMAT_VERSION,
    DebugPage,
    RecordingView,
    RequestView,
    ShadowTotalsView,
    SummaryView,
    merged,
)
from router.tenants.key_table import ApiKey, parse_keys
from tests.unit.router.insight.test_advice import SUMMARY, summary
from tests.unit.router.insight.test_explanation import REQUEST

CLIENT = httpx.Client
Handler = Callable[[httpx.Request], httpx.Response]


def page(
    requests: list[RequestView] | None = None, about: SummaryView = SUMMARY, version: int = FORMAT_VERSION
) -> httpx.Response:
    return httpx.Response(200, content=msgspec.json.encode(DebugPage(version, about, requests or [])))


def refusal(status: int, code: str, **headers: str) -> httpx.Response:
    body = {"error": {"message": "no", "type": "t", "param": None, "code": code}}
    return httpx.Response(status, json=body, headers=headers)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)

    def run(handler: Handler, *arguments: str) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""

        def client(**settings: Any) -> httpx.Client:
            return CLIENT(transport=httpx.MockTransport(handler), **settings)

        monkeypatch.setattr(httpx, "Client", client)
        status = command.main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_explain_tells_the_story_and_shows_the_candidates(run: Any) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.params["request_id"] == "r"
        return page([REQUEST])

    status, out, _ = run(answer, "explain", "r")
    assert status == 0
    assert "expected_time sent it to A" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["A", "1,952", "1", "0", "0", "400", "ms", "10", "ms", "420", "ms"] in rows
    assert ["B", "0", "1", "0", "0", "0", "ms", "590", "ms", "1.18", "s"] in rows


def test_explain_without_an_id_lists_the_latest(run: Any) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.params["last"] == "5"
        return page([REQUEST])

    status, out, _ = run(answer, "explain", "--last", "5")
    assert status == 0
    assert ["r", "prefix", "A", "1,980", "1,952", "430", "ms"] in [line.split() for line in out.splitlines()]


@pytest.mark.parametrize("arguments", [["explain"], ["explain", "trace:key:7"]], ids=["listed", "told"])
def test_an_id_with_colons_stays_what_it_is(run: Any, arguments: list[str]) -> None:
    """ ":key:" is a picture to rich, and ids may hold colons."""
    named = msgspec.structs.replace(REQUEST, request_id="trace:key:7")
    assert "trace:key:7" in run(lambda _: page([named]), *arguments)[1]


def test_a_request_of_another_router_is_found_by_asking_on(run: Any) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append("x")
        if len(asked) < 4:
            return refusal(404, "request_not_found", **{"x-warmpath-router": f"router {len(asked) % 2}"})
        return page([REQUEST])

    status, out, _ = run(answer, "explain", "r")
    assert status == 0
    assert "expected_time sent it to A" in out
    assert len(asked) == 4


def test_a_forgotten_request_names_what_to_do(run: Any) -> None:
    status, _, err = run(lambda _: refusal(404, "request_not_found"), "explain", "r")
    assert status == 1
    assert "r is not remembered (1 Router asked)" in err
    assert "debug_requests" in err
    assert "refused before it had a replica" in err


def turns(order: Iterable[str], num_routers: int) -> Handler:
    """Routers behind one address, reached in this order; each says how many there are. None remembers any
    request but the last's."""
    reached = iter(order)

    def answer(request: httpx.Request) -> httpx.Response:
        router = next(reached)
        about = msgspec.structs.replace(SUMMARY, router=router, num_routers=num_routers)
        if "request_id" not in request.url.params:
            return page(about=about)
        if router == "last":
            return page([REQUEST])
        said = {"x-warmpath-router": router, "x-warmpath-routers": str(num_routers)}
        return refusal(404, "request_not_found", **said)

    return answer


def test_a_router_that_is_reached_late_is_not_left_out(run: Any) -> None:
    """Connections reach Routers by chance: one of eight is missed by 24 of them in one case of 25."""
    order = [*"abc" * 9, "last", *"abc" * 30]
    status, out, _ = run(turns(order, 4), "advise")
    assert status == 0
    assert "4 Routers answered." in out
    assert "4,000 requests" in out
    assert "expected_time sent it to A" in run(turns(order, 4), "explain", "r")[1]


def test_routers_that_cannot_be_reached_are_told(run: Any) -> None:
    status, out, _ = run(turns(itertools.cycle("abc"), 4), "advise")
    assert status == 0
    assert "3 of 4 Routers answered: the sums leave the others out." in out
    assert "3,000 requests" in out
    status, _, err = run(turns(itertools.cycle("abc"), 4), "explain", "r")
    assert status == 1
    assert "r is not remembered (3 of 4 Routers asked)" in err


def test_routers_that_do_not_know_each_other_are_heard(run: Any) -> None:
    """Two deployments behind one address."""
    assert "2 Routers answered." in run(turns(itertools.cycle(["a", "a", "b"]), 1), "advise")[1]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (refusal(404, "unknown_url"), "expose_debug: true"),
        (refusal(401, "unauthorized"), "WARMPATH_DEBUG_TOKEN"),
        (refusal(401, "invalid_api_key"), "operator's API key"),
        (refusal(403, "insufficient_permissions"), "needs an operator's"),
        (refusal(500, "internal_error"), "answered 500: no"),
        (httpx.Response(502, text="<html>bad gateway"), "answered 502: <html>bad gateway"),
        (httpx.Response(200, text="hello"), "no Router of this version"),
        (page(version=99), "has version 99"),
    ],
)
@pytest.mark.parametrize("arguments", [("explain",), ("explain", "r"), ("advise",)])
def test_what_cannot_be_asked_says_why(
    run: Any, answer: httpx.Response, words: str, arguments: tuple[str, ...]
) -> None:
    status, _, err = run(lambda _: answer, *arguments)
    assert status == 1
    assert words in err


def test_no_server_is_said_with_its_address(run: Any) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("[Errno 111] Connection refused", request=request)

    status, _, err = run(answer, "advise", "--url", "http://127.0.0.1:9")
    assert status == 1
    assert "no server answers at http://127.0.0.1:9" in err
    assert "[Errno 111]" in err
    assert "make serve" in err


def test_a_url_that_is_none(run: Any) -> None:
    status, _, err = run(lambda _: page(), "advise", "--url", "http://host:port")
    assert status == 1
    assert "is not an address" in err


@pytest.mark.parametrize("host", ["127.0..1", "x" * 64])
@pytest.mark.parametrize("arguments", [("explain",), ("explain", "r"), ("advise",)])
def test_a_url_whose_host_no_socket_takes(
    capsys: pytest.CaptureFixture[str], host: str, arguments: tuple[str, ...]
) -> None:
    """It was a traceback: Python's own error of that is none of httpx's."""
    assert command.main([*arguments, "--url", f"http://{host}:9"]) == 1
    assert f"no server answers at http://{host}:9" in capsys.readouterr().err


def test_the_token_comes_from_the_option_or_the_environment(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return page()

    run(answer, "advise")
    run(answer, "advise", "--token", "given")
    monkeypatch.setenv(TOKEN_VARIABLE, "from outside")
    run(answer, "advise")
    assert list(dict.fromkeys(seen)) == [None, "Bearer given", "Bearer from outside"]


def test_advise_ranks_and_sums_up(run: Any) -> None:
    about = summary(
        uncached={"diverged": 120_000, "evicted": 200_000, "cold": 80_000},
        parting_tokens={"0": 120_000},
        parting_requests={"0": 400},
    )
    about = msgspec.structs.replace(
        about, shadow=ShadowTotalsView("power_of_two", 300, 700, 30.0, 10.0, 0.1, False, 700)
    )
    status, out, _ = run(lambda _: page(about=about), "advise")
    assert status == 0
    assert "600,000 (60.0%) came from caches" in out
    assert out.index("1. Give the replicas more cache") < out.index("2. Move what changes at the top")
    assert "at most 200,000 tokens (20.0%)" in out
    assert "disagreed with round_robin in 70% of 1,000 decisions" in out
    assert "20 ms dearer per request" in out


@pytest.mark.parametrize(
    ("agreed", "disagreed", "extra_s", "priced", "told"),
    [
        (
            10,
            0,
            0.0,
            0,
            "disagreed with round_robin in 0% of 10 decisions; by the live cost model its choices cost",
        ),
        (10, 0, 0.0, 0, "cost the same."),
        (0, 10, 0.0, 10, "cost the same."),
        (5, 5, 0.0, 0, "what its choices cost is not known"),
        (5, 15, 0.1, 5, "10 ms dearer per request"),  # ten have no price
    ],
)
def test_a_shadow_without_a_price_is_not_cheaper(
    agreed: int, disagreed: int, extra_s: float, priced: int, told: str, run: Any
) -> None:
    """It said 0 ms cheaper."""
    shadow = ShadowTotalsView("power_of_two", agreed, disagreed, extra_s, 0.0, 0.1, False, priced)
    _, out, _ = run(lambda _: page(about=msgspec.structs.replace(SUMMARY, shadow=shadow)), "advise")
    assert told in out
    assert "cheaper" not in out


def test_advise_says_when_there_is_nothing_to_say(run: Any) -> None:
    assert "Nothing to change" in run(lambda _: page(), "advise")[1]
    quiet = msgspec.structs.replace(SUMMARY, totals=msgspec.structs.replace(SUMMARY.totals, requests=0))
    assert "No request has been answered yet" in run(lambda _: page(about=quiet), "advise")[1]
    assert "has had no request yet" in run(lambda _: page(), "explain")[1]


def test_help_teaches(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["explain", "--help"], ["advise", "--help"]):
        with pytest.raises(SystemExit) as caught:
            command.main(arguments)
        assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "expose_debug: true" in out
    assert "never a prompt" in out
    assert "--url" in out


@pytest.mark.parametrize("arguments", [[], ["explain", "--last", "0"], ["explain", "a", "b"], ["advice"]])
def test_wrong_usage_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize("token", ["a-secret-of-mine\n", " a-secret-of-mine", "a-secret-of-miné"])
def test_a_token_that_no_header_brings_is_named_and_not_shown(run: Any, token: str) -> None:
    """Such as an environment variable with the line end of the file that it is from."""
    status, out, err = run(lambda _: page(), "explain", "--token", token)
    assert (status, out) == (1, "")
    assert f"the token (--token, or {TOKEN_VARIABLE}) cannot be sent" in err
    assert "secret" not in err


@pytest.mark.parametrize("number", ["0", "201", "few"])
def test_a_number_of_requests_that_none_is_is_told_its_range(
    number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["explain", "--last", number])
    assert "argument --last: must be a whole number between 1 and 200" in capsys.readouterr().err


def test_advice_adds_several_routers_up(run: Any) -> None:
    """Each answer comes from whichever Router the connection reached."""
    routers = itertools.cycle("abac")
    shadow = ShadowTotalsView("power_of_two", 5, 5, 1.0, 0.0, 0.1, False, 5)

    def answer(_request: httpx.Request) -> httpx.Response:
        about = summary(uncached={"evicted": 100_000}, parting_tokens={"0": 1}, parting_requests={"0": 1})
        return page(about=msgspec.structs.replace(about, router=next(routers), shadow=shadow))

    _, out, _ = run(answer, "advise")
    assert "3,000 requests, 3,000,000 prompt tokens: 1,800,000 (60.0%) came from caches" in out
    assert "at most 300,000 tokens (10.0%)" in out
    assert "in 50% of 30 decisions" in out


def test_routers_are_merged_field_by_field() -> None:
    loop = msgspec.structs.replace(SUMMARY.loop, requests=3000, recent_share_within_one=0.59, doubts=2)
    other = msgspec.structs.replace(
        summary(uncached={"cold": 5}), router="ef", loop=loop, recording=RecordingView(1, 2, 3, 0)
    )
    both = merged([msgspec.structs.replace(SUMMARY, totals=summary(uncached={"cold": 2}).totals), other])
    assert both.totals.uncached == {"cold": 7}
    assert (both.loop.requests, both.loop.doubts) == (4000, 2)
    assert both.loop.recent_share_within_one == pytest.approx(0.69)
    assert both.recording == RecordingView(1, 2, 3, 0)
    assert both.shadow is None
    assert both.cache_tokens == SUMMARY.cache_tokens, "the fleet is one, however many Routers see it"
    assert merged([SUMMARY]) == SUMMARY


def test_a_new_key_comes_with_its_entry_in_the_key_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["key", "alice-laptop", "--tenant", "alice", "--operator"]) == 0
    key, entry = re.fullmatch(r".*\n\n(wp-\S+)\n\n.*\n\n(.*)", capsys.readouterr().out, re.DOTALL).groups()  # type: ignore[union-attr]
    table = parse_keys("keys:\n" + entry)
    assert table.find(key.encode()) == ApiKey("alice-laptop", "alice", is_operator=True)
    assert key not in entry


@pytest.mark.parametrize("name", ["42", "no", "null", "1e3", "2026-01-01"])
def test_a_name_that_yaml_takes_for_something_else_is_quoted(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["key", name, "--tenant", name]) == 0
    key, entry = re.fullmatch(r".*\n\n(wp-\S+)\n\n.*\n\n(.*)", capsys.readouterr().out, re.DOTALL).groups()  # type: ignore[union-attr]
    assert parse_keys("keys:\n" + entry).find(key.encode()) == ApiKey(name, name)


def test_a_name_that_the_key_file_would_not_take_makes_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"name = 'a b': must be 1 to 64 letters"):
        command.main(["key", "a b"])
    assert "wp-" not in capsys.readouterr().out


def test_a_secret_is_long_and_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["key", "--secret"]) == 0
    assert re.fullmatch(r"[0-9a-f]{64}\n", capsys.readouterr().out)


@pytest.mark.parametrize("num_chars", [45, 137])
def test_ids_in_the_list_can_be_copied_at_80_columns(
    num_chars: int, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve's of 36 characters, with what the Router adds; a client's may have 128."""
    monkeypatch.setenv("COLUMNS", "80")
    name = "0123456789abcdef-" * 9
    request = msgspec.structs.replace(REQUEST, request_id=name[:num_chars])
    _, out, _ = run(lambda _: page([request]), "explain")
    [line] = [line for line in out.splitlines() if "430 ms" in line]
    assert line.split()[:3] == [name[:num_chars], "prefix", "A"]


def test_keys_and_secrets_are_not_cut_by_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever copies one that was would get 401, or a secret of several lines."""
    monkeypatch.setenv("COLUMNS", "20")
    command.main(["key", "x"])
    assert re.search(r"^wp-\S{43}$", capsys.readouterr().out, re.MULTILINE)
    command.main(["key", "--secret"])
    assert re.fullmatch(r"[0-9a-f]{64}\n", capsys.readouterr().out)


def test_ctrl_c_is_no_traceback(run: Any) -> None:
    def interrupted(_request: httpx.Request) -> httpx.Response:
        raise KeyboardInterrupt

    assert run(interrupted, "explain") == (command.INTERRUPTED, "", "Stopped.\n")
