"""One base port, a hundred ports: none shared by two uses, each checked before anything starts."""

from __future__ import annotations

import random
import socket
import subprocess
import sys

import pytest

from cache.errors import ConfigError
from deploy.errors import PortForbidden, PortTaken
from deploy.ports import HIGHEST_BASE, SPAN, Ports, free_base


def test_all_ports_lie_in_the_span_and_differ() -> None:
    ports = Ports(8000)
    environment = {key: int(value) for key, value in ports.environment().items()}
    low = (
        environment.pop("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"),
        environment.pop("RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT"),
    )
    high = (
        environment.pop("RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"),
        environment.pop("RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT"),
    )
    ranges = [port for start, end in zip(low, high, strict=True) for port in range(start, end + 1)]
    every = [ports.http, ports.dashboard, *environment.values(), *ranges]
    assert len(every) == len(set(every))
    assert all(8000 <= port < 8000 + SPAN for port in every)


def test_a_free_base_is_given_to_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its look and its binds another one would find the same span free."""
    program = "from deploy.ports import free_base; print(free_base(), flush=True); input()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        ours = next(base for base in iter(free_base, None) if base != theirs)
        monkeypatch.setattr(random, "sample", lambda *_, **__: [theirs, ours])
        assert free_base() == ours  # again: it has bound nothing
        other.communicate("\n")
    assert free_base() == theirs


def test_taken_port_is_named_with_a_way_out() -> None:
    base = free_base()
    Ports(base).check_free("127.0.0.1")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", base + 1))
        holder.listen()
        with pytest.raises(PortTaken, match=rf"port {base + 1} .*statistics.*make serve PORT="):
            Ports(base).check_free("127.0.0.1")


@pytest.mark.parametrize(
    "taken", [1, 8000, HIGHEST_BASE - SPAN, HIGHEST_BASE - SPAN + 1, HIGHEST_BASE + 5, 65535]
)
def test_the_way_out_is_a_base_that_may_be_chosen_and_does_not_meet_the_port(taken: int) -> None:
    base = int(str(PortTaken(taken, "HTTP")).rpartition("PORT=")[2])
    assert not Ports(base).base <= taken < base + SPAN


def test_the_last_port_of_the_highest_base_is_the_last_there_is() -> None:
    assert HIGHEST_BASE == 65436
    highest = Ports(HIGHEST_BASE).environment().values()
    assert max(map(int, highest)) == 65535


@pytest.mark.parametrize("base", [-5, 0, HIGHEST_BASE + 1, 70_000])
def test_a_base_whose_span_is_not_all_ports_is_refused_with_the_range(base: int) -> None:
    """`bind` has a traceback for these, or another meaning."""
    with pytest.raises(ConfigError, match=rf"^--port = {base}: must be between 1 and 65436"):
        Ports(base, "--port")


def test_a_port_that_this_user_may_not_have_is_not_called_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks for who has it finds nobody."""

    class Forbidding(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("deploy.ports.socket.socket", Forbidding)
    with pytest.raises(PortForbidden, match=r"may not listen on port 443 \(HTTP\)"):
        Ports(443).check_free("127.0.0.1")


@pytest.mark.parametrize("host", ["192.0.2.1", "::1", "nowhere.invalid"])
def test_a_host_that_is_not_this_machine_is_no_taken_port(host: str) -> None:
    """Another base would be refused in the same words, and so would every other."""
    with pytest.raises(
        ConfigError, match=rf"^http_options\.host = '{host}': must be an IPv4 address of this"
    ):
        Ports(free_base()).check_free(host)
