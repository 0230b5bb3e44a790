"""One try at asking a question: over which connection it went, and whose fault it is that it failed.

Knows httpx's errors and what httpcore tells of its connections; sends nothing.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Any

import httpx

from loadtest.client.answer import Failure

_NO_FILES = (errno.EMFILE, errno.ENFILE)  # of the process, of the machine


class Attempt:
    """`told` or `atold` is httpx's `trace`."""

    def __init__(self) -> None:
        self._is_connection_new = False
        self._had_head = False

    def told(self, event: str, info: dict[str, Any]) -> None:
        if event.startswith("connection.connect_"):
            self._is_connection_new = True
        elif event == "http11.receive_response_headers.complete":
            self._had_head = True

    async def atold(self, event: str, info: dict[str, Any]) -> None:
        self.told(event, info)

    def met_closed_connection(self, error: httpx.HTTPError) -> bool:
        """The server had closed the connection while it was idle: whatever was asked, it has not answered.

        Ends: what failed is not used again, and a new connection is no such.
        """
        is_closed = isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError)
        return is_closed and not self._is_connection_new and not self._had_head


def failure_of(error: httpx.HTTPError) -> Failure:
    if isinstance(error, httpx.ConnectError):
        return Failure.NO_FILES if _is_out_of_files(error) else Failure.UNREACHABLE
    if isinstance(error, httpx.ConnectTimeout):
        return Failure.UNREACHABLE
    return Failure.TIMEOUT if isinstance(error, httpx.TimeoutException) else Failure.CUT


def _is_out_of_files(error: httpx.ConnectError) -> bool:
    """A host whose name needs a file to be looked up is unknown without one: then only trying tells."""
    causes = list(_causes(error))
    if any(isinstance(cause, OSError) and cause.errno in _NO_FILES for cause in causes):
        return True
    return any(map(_is_of_a_name, causes)) and not _can_open()


def _is_of_a_name(error: BaseException) -> bool:
    """Whether looking a name up may have failed so: without files as EBUSY where names are asked of the local
    network, too (mDNS, as on desktops)."""
    return isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno == errno.EBUSY)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):  # of a host's several addresses
            for each in error.exceptions:
                yield from _causes(each)
        error = error.__cause__ or error.__context__


def _can_open() -> bool:
    try:
        socket.socket().close()
    except OSError as error:
        return error.errno not in _NO_FILES
    return True
