"""What Serve is told to put around what takes HTTP."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from deploy.environment import serve_environment
from deploy.http_errors import OneErrorShape, proxy_middlewares
from deploy.ports import Ports
from deploy.proxy import middlewares
from deploy.proxy_bodies import BodiesFromRouters
from deploy.request_ids import OneRequestId


def test_the_environment_names_it(tmp_path: Path) -> None:
    environment = serve_environment(Ports(20000), tmp_path, fast_proxy=False)
    module, name = environment["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"].rsplit(".", 1)
    assert getattr(import_module(module), name) is middlewares


def kinds() -> list[object]:
    return [middleware.cls for middleware in middlewares()]


def test_errors_have_the_last_word_and_ids_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve puts each around those before it."""
    monkeypatch.setenv("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "deploy.proxy.middlewares")
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    assert kinds() == [BodiesFromRouters, OneErrorShape, OneRequestId]


@pytest.mark.parametrize("variable", ["RAY_USE_TLS", "RAY_SERVE_ENABLE_HA_PROXY"])
def test_routers_that_send_by_calls_are_asked_for_nothing_else(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "deploy.proxy.middlewares")
    monkeypatch.setenv(variable, "1")
    assert kinds() == [OneErrorShape, OneRequestId]


def test_errors_alone_can_be_asked_for() -> None:
    assert [middleware.cls for middleware in proxy_middlewares()] == [OneErrorShape]
