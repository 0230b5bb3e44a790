"""What the client does by itself is in nobody's time to first token."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import httpx
import pytest

from loadtest.client.asking import Asker, AsyncAsker
from loadtest.client.endpoint import Endpoint

# In a process of its own: here everything is loaded already.
SCRIPT = """
import asyncio, sys
from loadtest.client.asking import AsyncAsker
from loadtest.client.endpoint import Endpoint
from loadtest.client.question import completion

async def answer(reader, writer):
    while await reader.readuntil(b"\\r\\n\\r\\n"):
        writer.write(b"HTTP/1.1 404 Not Found\\r\\ncontent-length: 0\\r\\n\\r\\n")

async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with AsyncAsker(Endpoint(f"http://127.0.0.1:{port}", "tiny")) as asker:
        before = set(sys.modules)
        found = await asker.ask(completion("x", max_tokens=1))
        print(found.status, sorted(set(sys.modules) - before))

asyncio.run(main())
"""


def test_libraries_are_loaded_before_the_first_question() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert ended.stdout == "404 []\n", ended.stderr


@pytest.mark.parametrize(("kind", "client"), [(Asker, "Client"), (AsyncAsker, "AsyncClient")])
def test_no_connection_is_kept_for_as_long_as_servers_keep_them(
    kind: type[Any], client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses of about uvicorn's five seconds ended in questions that were cut, over a network with delay."""
    asked: list[httpx.Limits] = []
    monkeypatch.setattr(httpx, client, lambda *, limits, timeout: asked.append(limits))
    kind(Endpoint("http://server", "tiny"))
    assert asked[0].keepalive_expiry is not None
    assert asked[0].keepalive_expiry <= 2.5
