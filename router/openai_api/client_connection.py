"""The connection that a request came by, dropped together with what waits in it for the client.

A server closes the connection of an application that fails, but sends first what waits there: a client
that takes nothing keeps it open, and a server that shuts down waits for it. ASGI has no word for more. So
this goes by the names that uvicorn (0.54) has, and Serve (ray 2.60) around it. Where there are none, as at a
Router behind Serve's Python proxy, nothing happens, and the server does as it does.
Knows nothing of requests.
"""

from __future__ import annotations

import socket
import struct

from starlette.types import Receive

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, for 0 seconds


def drop_connection(receive: Receive) -> None:
    """Reset it. Call where nothing is sent any more, on the event loop of the server.

    receive: as the server, or Serve, gave it to the application.
    """
    servers_own = getattr(receive, "_receive", receive)
    transport = getattr(getattr(servers_own, "__self__", None), "transport", None)
    if transport is not None and not transport.is_closing():
        # Else the system keeps what it has taken, some megabytes, until the client has that or leaves.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        transport.abort()
