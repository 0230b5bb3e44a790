"""One base port, a hundred ports: none shared by two uses, each checked before anything starts."""

from __future__ import annotations

import socket

import pytest

from deploy.errors import PortTaken
from deploy.ports import SPAN, Ports, free_base


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


def test_taken_port_is_named_with_a_way_out() -> None:
    base = free_base()
    Ports(base).check_free("127.0.0.1")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", base + 1))
        holder.listen()
        with pytest.raises(PortTaken, match=rf"port {base + 1} .*statistics.*make serve PORT="):
            Ports(base).check_free("127.0.0.1")
