"""What is ours in Serve's Python proxy, which finds it through `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`
(`environment.py`). The fast proxy has no such place."""

from __future__ import annotations

from starlette.middleware import Middleware

from deploy.http_errors import OneErrorShape
from deploy.proxy_bodies import BodiesFromRouters


def middlewares() -> list[Middleware]:
    """For Serve: it calls this once in every proxy. It puts each around those before it."""
    return [Middleware(BodiesFromRouters), Middleware(OneErrorShape)]
