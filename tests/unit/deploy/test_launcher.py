"""What the launcher says of a service that is ready, and of one that will never be."""

from __future__ import annotations

import inspect
import io
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import yaml
from ray import serve
from ray.exceptions import ActorDiedError, GetTimeoutError
from ray.serve._private.constants import HTTP_PROXY_TIMEOUT
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus
from ray.serve.scripts import cli as serve_cli
from rich.console import Console

from deploy.errors import ClusterTimedOut, DeployFailed, ProxyTimedOut
from deploy.launcher import (
    NO_PROXY,
    _hashing,
    _replica_line,
    _serve,
    _start_cluster,
    _Watch,
    _wrong_setting,
)
from deploy.ports import Ports
from deploy.serve_file import ServeFile

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("prefix", "url"), [("/", "http://127.0.0.1:9100"), ("/llm", "http://127.0.0.1:9100/llm")]
)
def test_it_looks_where_the_application_is(prefix: str, url: str) -> None:
    """At the root a service under /llm is never ready, and the command that is shown finds nothing."""
    assert watch_of(prefix)._url == url


def watch_of(route_prefix: str = "/", said: io.StringIO | None = None) -> _Watch:
    content = yaml.safe_load((ROOT / "deploy.yaml").read_text())
    content["applications"][0]["route_prefix"] = route_prefix
    file = ServeFile.checked(Path("deploy.yaml"), content)
    return _Watch(
        file,
        Ports(9100),
        Console(file=said or io.StringIO()),
        fast_proxy=False,
        ray_dashboard=False,
        began=0.0,
    )


def application(**messages: str) -> SimpleNamespace:
    """As Serve tells of it while it starts, with what it says of each deployment."""
    deployments = {
        name: SimpleNamespace(message=message, replica_states={}) for name, message in messages.items()
    }
    return SimpleNamespace(status=ApplicationStatus.DEPLOYING, message="", deployments=deployments)


def test_what_finds_no_room_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited without a word, for ever."""
    waits = (
        "'{}' has 1 replicas that have taken more than 30s to be scheduled. Resources: {{'CPU': 0.2}}, [0]"
    )
    told = [
        application(Router="", Replica="replicas that have taken more than 30s to initialize"),
        application(Router=waits.format("Router"), Replica=""),
        application(Router=waits.format("Router") + " now 0.1", Replica=waits.format("Replica")),
    ]
    said = io.StringIO()
    watch = watch_of(said=said)
    for each in told:
        status = SimpleNamespace(applications={"warmpath": each})
        monkeypatch.setattr(serve, "status", lambda status=status: status)
        watch._describe()
    assert said.getvalue() == waits.format("Router") + "\n" + waits.format("Replica") + "\n"


@pytest.mark.parametrize(
    "error", [ActorDiedError(), GetTimeoutError("no answer"), RayServeException("no controller")]
)
def test_a_controller_that_does_not_answer_is_asked_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At Ctrl-C it is ended while it is asked: that was a traceback, and any other such moment the end of
    whoever says that the service is ready."""
    answers = iter([error, SimpleNamespace(applications={"warmpath": application(Replica="", Router="")})])

    def status() -> SimpleNamespace:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(serve, "status", status)
    watch = watch_of()
    assert watch._describe() == "Starting Ray Serve"
    assert watch._describe().startswith("Loading the model")


def test_a_start_that_fails_wakes_the_command_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps for ten seconds at a time: what only asks to be interrupted is heard after them."""

    def fail(watch: _Watch) -> bool:
        time.sleep(0.5)  # until it sleeps
        raise DeployFailed("no memory")

    monkeypatch.setattr(_Watch, "_until_ready", fail)
    watch, began = watch_of(), time.monotonic()
    watch.start()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(20)
    assert time.monotonic() - began < 20
    watch.stop()
    assert isinstance(watch.failure, DeployFailed)


@pytest.mark.parametrize(
    ("num_ranks", "where"), [(1, "cpu, float32, "), (2, "cpu, 2 ranks, float32, ")], ids=["one", "two"]
)
def test_a_replica_is_shown_with_its_ranks_where_it_has_several(num_ranks: int, where: str) -> None:
    replica = {
        "replica_id": "r1",
        "device": "cpu",
        "num_ranks": num_ranks,
        "kv_dtype": "float32",
        "attention_backend": "gather_sdpa",
        "num_blocks": 1024,
        "block_size": 16,
    }
    assert _replica_line(replica) == f"r1  {where}gather_sdpa attention, 1024 blocks of 16 tokens"


@pytest.mark.parametrize(
    ("hashes", "decisions", "says"),
    [
        (True, True, "blocks by xxh3_128"),
        (False, True, "blocks by xxh3_128, hashed in Python, slower: no C compiler, or"),
        (True, False, "blocks by xxh3_128, decided in Python, slower: no C compiler, or"),
        (False, False, "blocks by xxh3_128, hashed and decided in Python, slower: no C compiler, or"),
    ],
)
def test_what_is_not_compiled_is_told(hashes: bool, decisions: bool, says: str) -> None:
    version = {"hash_algorithm": "xxh3_128", "compiled_hashes": hashes, "compiled_decisions": decisions}
    told = _hashing(version)
    assert told == says if hashes and decisions else told.startswith(says)


TRACEBACK = """\
A replica failed to start with exception. Retrying 2 more time(s). Error:
Traceback (most recent call last):
  File "replica/server.py", line 61, in __init__
    raise error
{error}
"""


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            TRACEBACK.format(error="replica.models.model_source.NotEnoughMemory: model = 'x': needs 9 GiB"),
            "NotEnoughMemory: model = 'x': needs 9 GiB",
        ),
        (
            TRACEBACK.format(error="cache.errors.ConfigError: num_blocks = 0: must be at least 1"),
            "ConfigError: num_blocks = 0: must be at least 1",
        ),
        (  # of two replicas that share a machine; the other one has the port
            TRACEBACK.format(
                error="replica.errors.EventSocketError: event_host = '127.0.0.1', event_port = 5"
            ),
            "EventSocketError: event_host = '127.0.0.1', event_port = 5",
        ),
        (TRACEBACK.format(error="OSError: the hub does not answer"), None),  # it may the next time
        ("", None),
    ],
)
def test_what_a_setting_makes_impossible_is_not_tried_again(message: str, told: str | None) -> None:
    deployments = {
        name: SimpleNamespace(message=text) for name, text in (("Router", ""), ("Replica", message))
    }
    assert _wrong_setting(SimpleNamespace(deployments=deployments)) == told


def test_a_cluster_that_is_not_up_in_rays_time_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's words are read from its source: another release may have others."""
    source = Path(inspect.getfile(ray._private.node)).read_text()
    assert "raylet_start_wait_time_s = 30" in source
    words = "The current node timed out during startup. "
    assert f'"{words}' in source

    def fail(**_: object) -> None:
        raise Exception(words)

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ClusterTimedOut, match="start it again when less runs here"):
        _start_cluster(Ports(9100), ray_dashboard=False, verbose=False)


def test_a_proxy_that_is_not_ready_in_serves_time_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(serve._private.api)
    assert f'"{NO_PROXY} after {{HTTP_PROXY_TIMEOUT}}s."' in source
    assert "not ready in Serve's own time, 60 s" in ProxyTimedOut.what
    assert HTTP_PROXY_TIMEOUT == 60

    def fail(*_: object, **__: object) -> None:
        raise TimeoutError(f"{NO_PROXY} after 60s.")

    monkeypatch.setattr(serve_cli, "main", fail)
    with pytest.raises(ProxyTimedOut, match="start it again when less runs here"):
        _serve(Path("deploy.yaml"))


def test_whatever_else_takes_too_long_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TimeoutError("something else")

    monkeypatch.setattr(serve_cli, "main", fail)
    with pytest.raises(TimeoutError, match="something else"):
        _serve(Path("deploy.yaml"))


def test_whatever_else_ray_says_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("no room for the object store")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(RuntimeError, match="no room for the object store"):
        _start_cluster(Ports(9100), ray_dashboard=False, verbose=False)
