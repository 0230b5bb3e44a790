"""A Router on real engines for the rows of one file, and the `openai` client that asks it.

It runs behind uvicorn in this process, with engines over the embedded model as its replicas; only Ray is not
there. Rows about failures ask a Router whose replicas follow a script. `make conformance` prints the table.
"""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.conformance.asking import client_of
from tests.http_server import HttpServer, engine_server


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with engine_server(expose_routing=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made
