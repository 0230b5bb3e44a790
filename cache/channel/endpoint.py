"""Where a channel's server listens, as text: `tcp://host:port`."""

from __future__ import annotations


def endpoint_of(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def address_of(endpoint: str) -> tuple[str, int]:
    """Inverse of `endpoint_of`. Raises ValueError for anything else."""
    scheme, _, place = endpoint.partition("://")
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or not host or not 0 < int(port) < 1 << 16:
        raise ValueError(f"not an endpoint: {endpoint!r}")
    return host.strip("[]"), int(port)
