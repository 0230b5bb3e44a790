"""What Serve need not fetch from its Python proxy: a request's body that came with the request.

For each request Serve calls the proxy's actor, for the body, and again for the news that the client has gone,
by which time it has cancelled the request. With the body here both calls are for nothing, and cost a Router
and a proxy a tenth of a streamed answer's CPU. A proxy that dies cancels nothing: it is asked then.
There is no public way to say so: this touches the one private attribute that the calls go by, and where Serve
has none of that name they are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ray.serve._private.common import RequestMetadata
from ray.serve._private.http_util import ASGIReceiveProxy
from starlette.types import Receive

_CALL = "_receive_asgi_messages"


def fetch_when_lost(receive: Receive, lost: asyncio.Future[None]) -> None:
    """Call it before the application first waits: Serve's task has not begun by then.

    lost: done when the proxy is. Others wait for it, too.
    """
    call: Callable[[RequestMetadata], Awaitable[bytes]] | None = getattr(receive, _CALL, None)
    if not isinstance(receive, ASGIReceiveProxy) or call is None:
        return

    async def call_late(request: RequestMetadata) -> bytes:
        """Serve cancels it when the request has ended."""
        await asyncio.shield(lost)
        return await call(request)

    setattr(receive, _CALL, call_late)
