"""What is ours where Serve takes HTTP, which finds it through `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`
(`environment.py`): its Python proxy, or, behind HAProxy, its server in each Router. HAProxy itself has no
such place."""

from __future__ import annotations

import os

from starlette.middleware import Middleware

from deploy.http_errors import OneErrorShape
from deploy.proxy_bodies import BodiesFromRouters
from deploy.request_ids import OneRequestId
from router.bodies.body_channel import proxies_take_bodies


def middlewares() -> list[Middleware]:
    """For Serve: it calls this once for every server. It puts each around those before it."""
    bodies = [Middleware(BodiesFromRouters)] if proxies_take_bodies(os.environ) else []
    return [*bodies, Middleware(OneErrorShape), Middleware(OneRequestId)]
