"""What Serve's Python proxy is told to put around itself."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from deploy.environment import serve_environment
from deploy.http_errors import OneErrorShape, proxy_middlewares
from deploy.ports import Ports
from deploy.proxy import middlewares
from deploy.proxy_bodies import BodiesFromRouters


def test_the_environment_names_it(tmp_path: Path) -> None:
    environment = serve_environment(Ports(20000), tmp_path, fast_proxy=False)
    module, name = environment["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"].rsplit(".", 1)
    assert getattr(import_module(module), name) is middlewares


def test_errors_have_the_last_word() -> None:
    """Serve puts each around those before it."""
    assert [middleware.cls for middleware in middlewares()] == [BodiesFromRouters, OneErrorShape]


def test_errors_alone_can_be_asked_for() -> None:
    assert [middleware.cls for middleware in proxy_middlewares()] == [OneErrorShape]
