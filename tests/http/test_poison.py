"""What clients should never send, sent to real engines over real HTTP: only 4xx, no hang, nothing harmed."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.fuzz_bodies import GOOD, POISON, corpus, mutated
from tests.http_server import HttpServer, engine_server

MAX_MODEL_LEN = 256  # short contexts: a mutated body without max_tokens generates no more than this
NUM_BLOCKS = 256  # of each of two replicas, 16 tokens each: the longest requests of half the clients
CLIENTS = 32  # at once: an engine's step takes hardly longer for more of them
CANARY = {"model": "tiny", "prompt": "The sea", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LIMIT_S = 60.0  # of one request: no hang. Nobody is refused for having to wait, however slow the machine


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    limits: dict[str, Any] = {"replica": {"max_model_len": MAX_MODEL_LEN}, "max_wait_s": None}
    with engine_server(num_blocks=NUM_BLOCKS, **limits) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: HttpServer) -> Iterator[httpx.Client]:
    # Connections are given up before the server gives them up: what is sent then would be lost.
    limits = httpx.Limits(max_connections=CLIENTS, keepalive_expiry=2.0)
    with httpx.Client(base_url=server.url, timeout=LIMIT_S, limits=limits) as made:
        yield made


@pytest.fixture(scope="module")
def canary(client: httpx.Client) -> str:
    """What a good request is answered, as long as the engines are unharmed."""
    return ask_canary(client)


def ask_canary(client: httpx.Client) -> str:
    answer = client.post("/v1/completions", json=CANARY)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def assert_unharmed(client: httpx.Client, canary: str) -> None:
    """The next request is fine, and no engine works for anybody who is gone, or holds what was given back."""
    assert ask_canary(client) == canary
    for held in client.get("/v1/prefixes").json()["data"]:
        assert client.delete(f"/v1/prefixes/{held['id']}").status_code in (200, 404)  # its time may be over
    deadline = time.monotonic() + LIMIT_S  # what an engine says of itself may be a moment old
    while num_running(client) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert num_running(client) == 0
    lines = client.get("/metrics").text.splitlines()
    in_flight = [line for line in lines if line.startswith("warmpath_requests_in_flight{")]
    assert [line.rsplit(" ", 1)[1] for line in in_flight] == ["0.0"]


def num_running(client: httpx.Client) -> int:
    return sum(int(replica["num_running"]) for replica in client.get("/version").json()["replicas"])


def check(answer: httpx.Response) -> None:
    """A whole answer, or a refusal in the one shape. What is to be held for a second may be computed later
    than that, or be refused since it would be."""
    is_late = answer.url.path == "/v1/prefixes" and answer.status_code in (429, 504)
    assert is_late or answer.status_code in (200, 400, 404, 413), (answer.status_code, answer.text[:300])
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.content.endswith(b"data: [DONE]\n\n")


def run(client: httpx.Client, canary: str, count: int, seed: int) -> Counter[int]:
    """Mutated bodies, many at a time. How many were answered with which status."""
    statuses: Counter[int] = Counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        bodies = mutated(count, seed)
        while some := list(itertools.islice(bodies, 250)):
            answers = pool.map(lambda body: client.post(body[0], content=body[1]), some)
            for (path, content), answer in zip(some, answers, strict=True):
                try:
                    check(answer)
                except AssertionError:
                    print(path, content[:2000])
                    raise
                statuses[answer.status_code] += 1
            assert_unharmed(client, canary)
    return statuses


def test_300_mutated_bodies(client: httpx.Client, canary: str) -> None:
    statuses = run(client, canary, 300, seed=1)
    assert statuses[200] > 20, "the mutations never get far"
    assert statuses[400] > 100


@pytest.mark.long
@pytest.mark.broad
@pytest.mark.timeout(1800)
def test_10_000_mutated_bodies(client: httpx.Client, canary: str) -> None:
    run(client, canary, 10_000, seed=2)


def test_the_bodies_that_are_mutated_are_good_ones(client: httpx.Client) -> None:
    for path, body in GOOD:
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def bodies(client: httpx.Client) -> dict[str, tuple[str, bytes]]:
    """The corpus for this model."""
    assert client.get("/v1/models/tiny").json()["max_model_len"] == MAX_MODEL_LEN
    return corpus(MAX_MODEL_LEN, _vocab_size(client))


@pytest.mark.parametrize("name", list(corpus(1, 1)))
def test_the_corpus_is_refused(
    client: httpx.Client, canary: str, bodies: dict[str, tuple[str, bytes]], name: str
) -> None:
    path, content = bodies[name]
    answer = client.post(path, content=content)
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:300])
    check(answer)
    assert len(answer.content) < 2000  # a refusal does not send back what it refuses
    assert_unharmed(client, canary)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(.*)*" * 8])
def test_a_regular_expression_that_never_ends_holds_nobody_up(
    client: httpx.Client, canary: str, pattern: str
) -> None:
    """Followed by an automaton, or refused: not tried in every way there is."""
    check(client.post("/v1/completions", json={**CANARY, "ignore_eos": False, "guided_regex": pattern}))
    assert_unharmed(client, canary)


def _vocab_size(client: httpx.Client) -> int:
    """As the refusal of an impossible id tells it."""
    message = client.post("/detokenize", json={"tokens": [1 << 30]}).json()["error"]["message"]
    found = re.search(r"from 0 to (\d+)", message)
    assert found is not None
    return int(found[1]) + 1


PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/prefixes", "/tokenize", "/detokenize")


def _poisoned(path: str) -> list[bytes]:
    """Every poison in every field of a good body."""
    body = next(body for at, body in GOOD if at == path)
    return [json.dumps({**body, field: value}).encode() for field in body for value in POISON]


def send_all(client: httpx.Client, path: str, contents: list[bytes]) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        for answer in pool.map(lambda content: client.post(path, content=content), contents):
            check(answer)


@pytest.mark.parametrize("path", PATHS)
def test_some_poison_in_every_field(client: httpx.Client, canary: str, path: str) -> None:
    send_all(client, path, random.Random(3).sample(_poisoned(path), 60))
    assert_unharmed(client, canary)


@pytest.mark.long
@pytest.mark.parametrize("path", PATHS)
def test_every_poison_in_every_field(client: httpx.Client, canary: str, path: str) -> None:
    send_all(client, path, _poisoned(path))
    assert_unharmed(client, canary)


# --- larger than any limit ---------------------------------------------------------------------------


def converse(server: HttpServer, pieces: Iterator[bytes]) -> bytes:
    """Sends until it is done or the server will not have more; the answer's first line, b"" if it was cut."""
    with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as link:
        with contextlib.suppress(OSError):
            for piece in pieces:
                link.sendall(piece)
        received = b""
        with contextlib.suppress(ConnectionError):
            while b"\r\n" not in received and (content := link.recv(65536)):
                received += content
    return received.partition(b"\r\n")[0]


def refused(status_line: bytes, *statuses: int) -> bool:
    """Answered with one of these, or cut off while still sending."""
    return not status_line or any(status_line.startswith(b"HTTP/1.1 %d " % status) for status in statuses)


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    "header",
    [b"x-large: " + b"x" * (2 << 20), b"\r\n".join(b"x-%d: x" % number for number in range(150_000))],
)
def test_2_mb_of_headers(server: HttpServer, client: httpx.Client, canary: str, header: bytes) -> None:
    def pieces() -> Iterator[bytes]:
        yield HEAD + header + b"\r\ncontent-length: 2\r\n\r\n{}"

    assert refused(converse(server, pieces()), 400, 431)
    assert_unharmed(client, canary)


@pytest.mark.parametrize("is_declared", [True, False])
def test_100_mb_of_body(server: HttpServer, client: httpx.Client, canary: str, is_declared: bool) -> None:
    chunk = b" " * (1 << 20)

    def pieces() -> Iterator[bytes]:
        if is_declared:
            yield HEAD + b"content-length: %d\r\n\r\n" % (100 << 20)
        else:
            yield HEAD + b"transfer-encoding: chunked\r\n\r\n"
        for _ in range(100):
            yield chunk if is_declared else b"%x\r\n%b\r\n" % (len(chunk), chunk)

    assert refused(converse(server, pieces()), 413)
    assert_unharmed(client, canary)


@pytest.mark.parametrize(
    "content", [b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"\r\n" * 1000]
)
def test_what_is_no_http(server: HttpServer, client: httpx.Client, canary: str, content: bytes) -> None:
    def pieces() -> Iterator[bytes]:
        yield content + HEAD + b"content-length: x\r\n\r\n"

    assert refused(converse(server, pieces()), 400)
    assert_unharmed(client, canary)


def test_a_body_that_never_comes_holds_nobody_up(
    server: HttpServer, client: httpx.Client, canary: str
) -> None:
    links = [socket.create_connection(("127.0.0.1", server.port), LIMIT_S) for _ in range(50)]
    try:
        for link in links:
            link.sendall(HEAD + b"content-length: 1000\r\n\r\n{")
        assert ask_canary(client) == canary
    finally:
        for link in links:
            link.close()
    assert_unharmed(client, canary)


def test_refusals_never_quote_the_prompt(client: httpx.Client) -> None:
    secret = "a secret that nobody may read"
    for fields in _wrong_ones(secret):
        answer = client.post("/v1/chat/completions", json=fields)
        assert answer.status_code == 400
        assert secret not in answer.text


def _wrong_ones(secret: str) -> Iterator[dict[str, Any]]:
    good = {"model": "tiny", "messages": [{"role": "user", "content": secret}]}
    yield {**good, "temperature": secret}
    yield {**good, "stop": {secret: secret}}
    yield {**good, "messages": secret}
    yield {**good, "messages": [{"role": secret, "content": secret}]}
    yield {**good, "n": secret}
    yield {**good, "messages": [{"role": "user", "content": secret * 200}]}
    yield {**good, "response_format": {"type": "json_schema", "json_schema": {"description": secret}}}
