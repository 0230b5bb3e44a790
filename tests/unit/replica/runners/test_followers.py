"""What rank 0 hears of its followers, which stand-ins are here: scripts that import nothing of ours."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator

import pytest

from replica.errors import CollectiveFailed, RankLost, RankRefused, RankSilent
from replica.parallel import orders
from replica.parallel.orders import AllocatePages, Answer, Failed, Loaded, Refused
from replica.runners import followers
from replica.runners.followers import Followers

LIMIT_S = 60.0  # never reached
WAITS = "sys.stdin.buffer.read()"
WAITS_FOR_AN_ORDER = "sys.stdin.buffer.read(1)"


def says(answer: Answer) -> str:
    return f"os.write(int(sys.argv[1]), {orders.framed(answer)!r})"


class Started:
    def __init__(self, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[RankLost] = []
        monkeypatch.setattr(followers, "FOLLOWER", ("-S", "-c", f"import os, sys; {script}"))
        self.followers = Followers(2, shared_fd=sys.stderr.fileno(), on_lost=self.told.append)


Start = Callable[..., Started]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    all_started: list[Started] = []

    def begin(*script: str) -> Started:
        all_started.append(Started("; ".join(script), monkeypatch))
        return all_started[-1]

    yield begin
    for started in all_started:
        started.followers.close()


@pytest.mark.parametrize(
    ("last_words", "kind", "told"),
    [
        (Refused("no memory"), RankRefused, "rank 1 cannot serve its part: no memory"),
        (Failed("KeyError: 3"), RankLost, "rank 1 of the model has gone: KeyError: 3"),
        (None, RankLost, "rank 1 of the model has gone, with exit code 3"),
    ],
)
def test_who_ends_is_told_of_with_what_it_said(
    last_words: Answer | None,
    kind: type[RankLost],
    told: str,
    start: Start,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the log, too: that is all there is where rank 0 cannot raise it."""
    started = start(*([] if last_words is None else [says(last_words)]), "sys.exit(3)")
    with pytest.raises(RankLost) as caught:
        started.followers.hear_each(LIMIT_S)
    assert (type(caught.value), str(caught.value)) == (kind, told)
    assert started.told == [caught.value]
    [line] = [each for each in caplog.records if each.levelno == logging.CRITICAL]
    assert vars(line)["rank"] == 1
    assert vars(line).get("reason") == caught.value.cause
    assert vars(line).get("exit_code") == caught.value.exit_code


def test_who_refuses_later_is_no_answer_to_wait_for(start: Start) -> None:
    started = start(says(Loaded()), WAITS_FOR_AN_ORDER, says(Refused("no memory")), WAITS)
    assert started.followers.hear_each(LIMIT_S) == [Loaded()]
    assert started.followers.lost() is None
    started.followers.tell(AllocatePages(1))
    with pytest.raises(RankRefused):
        started.followers.hear_each(LIMIT_S)


def test_who_stands_still_is_named(start: Start) -> None:
    started = start(WAITS)
    with pytest.raises(RankSilent, match=r"^rank 1 of the model has not answered for 0\.01 s"):
        started.followers.hear_each(0.01)
    assert not started.told


def test_a_failed_collective_waits_for_the_news_of_who_has_gone(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which comes after: the others' connections are closed before rank 0 hears of an end."""
    started = start(WAITS_FOR_AN_ORDER, "sys.exit(3)")
    own = ValueError("of rank 0 itself")
    assert started.followers.cause_of(own) is own
    monkeypatch.setattr(followers, "FIND_CAUSE_S", 0.01)
    collective, forward = CollectiveFailed(0, "Timed out", LIMIT_S), ValueError("its forward fails")
    forward.__cause__ = collective
    assert started.followers.cause_of(forward) is collective, "nobody has gone"

    monkeypatch.setattr(followers, "FIND_CAUSE_S", LIMIT_S)
    started.followers.tell(AllocatePages(1))
    cause = started.followers.cause_of(forward)
    assert isinstance(cause, RankLost)
    assert cause.exit_code == 3
    assert started.followers.cause_of(own) is cause
