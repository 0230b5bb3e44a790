"""Every port of a deployment that can be chosen, derived from one base port.

Two checkouts with base ports 100 apart never meet. What Ray binds besides is on free ports;
docs/security.md names the sockets that cannot be set or confined.
"""

from __future__ import annotations

import atexit
import errno
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from cache.errors import ConfigError
from deploy.errors import PortForbidden, PortTaken

SPAN = 100  # ports [base, base + SPAN) belong to one deployment
HIGHEST_BASE = (1 << 16) - SPAN  # the last port of the span is the last there is

_claimed: set[int] = set()  # bases that `free_base` gave out in this process


@dataclass(frozen=True, slots=True)
class Ports:
    """[base, base + 100): the HTTP port first, then what stands behind it.

    Raises ConfigError for a base whose span is not all ports.
    """

    base: int
    named: str = "port"  # as whoever chose it calls it: for errors

    def __post_init__(self) -> None:
        if not 1 <= self.base <= HIGHEST_BASE:
            accepted = f"must be between 1 and {HIGHEST_BASE}: ports [port, port + {SPAN}) are used"
            raise ConfigError(self.named, self.base, accepted)

    @property
    def http(self) -> int:
        return self.base

    @property
    def dashboard(self) -> int:
        return self.base + 5

    def environment(self) -> dict[str, str]:
        """Serve's own variables for the fast proxy and for the replicas' direct ports."""
        base = self.base
        return {
            "RAY_SERVE_HAPROXY_STATS_PORT": str(base + 1),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(base + 2),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(base + 3),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(base + 4),
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(base + 10),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(base + 54),
            "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(base + 55),
            "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(base + 99),
        }

    def needed(self) -> Iterator[tuple[int, str]]:
        yield self.http, "HTTP"
        yield self.base + 1, "fast proxy's statistics"
        yield self.base + 2, "fast proxy's metrics"
        yield self.base + 3, "fallback proxy"
        yield self.dashboard, "Ray dashboard"

    def check_free(self, host: str) -> None:
        """Raises PortTaken for the first port that somebody listens on, PortForbidden for one that this user
        may not listen on, ConfigError for a host where nobody can listen here."""
        for port, use in self.needed():
            error = _bind_error(host, port)
            if isinstance(error, PermissionError):
                raise PortForbidden(port, use)
            if error is not None and error.errno == errno.EADDRINUSE:
                raise PortTaken(port, use)
            if error is not None:
                accepted = f"must be an IPv4 address of this machine, or 0.0.0.0 ({error.strerror})"
                raise ConfigError("http_options.host", host, accepted)


def is_free(host: str, port: int) -> bool:
    """Whether both this host's address and the wildcard can be bound: the proxies use either."""
    return _bind_error(host, port) is None


def _bind_error(host: str, port: int) -> OSError | None:
    """Why one of the two cannot be bound; None if both can."""
    for address in {host, "0.0.0.0"}:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                return error
    return None


def free_base() -> int:
    """A base port whose whole span is free, and was given to no other process that runs: for tests.

    Below 32,768, where systems start to hand out ports for outgoing connections: Ray's processes open many
    between this look and Serve's bind.
    """
    for base in random.sample(range(20_000, 32_700, SPAN), k=127):
        if all(is_free("127.0.0.1", base + offset) for offset in range(SPAN)) and _claim(base):
            return base
    raise PortTaken(20_000, "every span of ports up to 32,700")


def _claim(base: int) -> bool:
    """Whether it is this process's until it ends: it keeps that number's UDP port, which no part of a
    deployment uses."""
    if base not in _claimed:
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind(("127.0.0.1", base))
        except OSError:
            claim.close()
            return False
        _claimed.add(base)
        atexit.register(claim.close)
    return True
