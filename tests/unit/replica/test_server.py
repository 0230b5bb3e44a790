"""What a replica adds to Serve."""

from __future__ import annotations

import logging

import pytest

from cache.errors import DeadlineExceeded, QueueFull
from replica import server


@pytest.mark.parametrize(
    ("error", "is_logged"),
    [(DeadlineExceeded(0.3, 0.31), False), (QueueFull(3, 4), False), (ValueError(), True)],
)
def test_a_refusal_is_no_failed_request_in_serves_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, is_logged: bool
) -> None:
    """Each of a client's deadlines was an error with a traceback there."""
    serves = logging.getLogger("ray.serve")
    monkeypatch.setattr(serves, "filters", [])
    monkeypatch.setattr(serves, "handlers", [caplog.handler])
    monkeypatch.setattr(logging, "raiseExceptions", True)  # set for the whole process
    monkeypatch.setattr(server, "_replica_id", lambda: "r")
    monkeypatch.setattr(server, "pass_on", lambda package, targets: None)  # likewise
    server._log_through_serve()
    serves.error("Request failed.", exc_info=error)
    assert bool(caplog.records) is is_logged
