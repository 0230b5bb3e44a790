"""Stand-ins around the HTTP surface: a tokenizer of bytes, replicas that follow a script, a whole Router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.types import ASGIApp, Message

from cache.fingerprint import Fingerprint, HashAlgorithm
from cache.messages import (
    Delta,
    FinishReason,
    GenerateRequest,
    HeldPrefix,
    InheritPin,
    ReleasePin,
    ReplicaInfo,
)
from cache.types import ReplicaId
from router.assembly import RouterParts
from router.config import RouterConfig
from router.openai_api.about import Readiness
from router.openai_api.app import build_api
from router.prompts.prompt import PromptEncoder

MODEL = "tiny"
BLOCK_SIZE = 4
MAX_MODEL_LEN = 200
FINGERPRINT = Fingerprint(
    model_id="tiny",
    revision="r1",
    kv_dtype="float32",
    template_digest="",
    block_size=BLOCK_SIZE,
    hash_algorithm=HashAlgorithm.SHA256,
)


class ByteTokenizer:
    """Tokens are UTF-8 bytes; a chat is `role:content` lines and the assistant's turn."""

    chat_template = "bytes"
    special_tokens_map: dict[str, str] = {}  # noqa: RUF012  # as transformers has it
    added_tokens_decoder: dict[int, str] = {}  # noqa: RUF012
    all_special_ids: list[int] = []  # noqa: RUF012

    def get_vocab(self) -> dict[str, int]:
        return {chr(0x100 + byte): byte for byte in range(256)}

    def __call__(self, text: str, **_kwargs: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, token_ids: Sequence[int], **_kwargs: Any) -> str:
        return bytes(token_ids).decode(errors="replace")

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [chr(0x100 + token_id) for token_id in token_ids]

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], *, tokenize: bool = True, **_kwargs: Any
    ) -> list[int] | str:
        lines = "".join(f"{message['role']}:{message['content']}\n" for message in messages) + "assistant:"
        return list(lines.encode()) if tokenize else lines


def a_replica_info(**changes: Any) -> ReplicaInfo:
    fields: dict[str, Any] = {
        "fingerprint": FINGERPRINT,
        "event_endpoint": "inproc://nowhere",
        "snapshot_endpoint": "inproc://nowhere",
        "num_blocks": 1000,
        "max_model_len": MAX_MODEL_LEN,
        "max_batched_tokens": 512,
        "device": "cpu",
        "attention_backend": "none",
    }
    return ReplicaInfo(**{**fields, **changes})


Script = Callable[[GenerateRequest, ReplicaId], AsyncGenerator[Delta, None]]


def text_of(position: int) -> str:
    """The text of the output token at `position`: the same on every replica."""
    return f"t{position} "


async def counting(request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
    """Two tokens per delta up to max_tokens; continues where an earlier attempt stopped."""
    position = len(request.token_ids) - request.num_prompt_tokens
    skip = request.sent_chars - sum(len(text_of(i)) for i in range(position))
    limit = request.sampling.max_tokens
    while position < limit:
        count = min(2, limit - position)
        text = "".join(text_of(position + i) for i in range(count))
        position += count
        finish = FinishReason.LENGTH if position >= limit else None
        yield Delta(text[skip:], tuple(range(100, 100 + count)), 0, finish)
        skip = 0
        await asyncio.sleep(0)


@dataclass
class ScriptedReplicas:
    """`ReplicaCalls` whose replicas do what their script says. Accepts for the first rank."""

    scripts: dict[ReplicaId, Script] = field(default_factory=dict)
    requests: list[tuple[ReplicaId, GenerateRequest]] = field(default_factory=list)
    running: int = 0
    cancelled: int = 0
    parts: RouterParts | None = None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        replica_id = request.ranks[0]
        assert replica_id not in request.excluded_replicas
        self.requests.append((replica_id, request))
        assert self.parts is not None
        self.parts.routing.routed(request.request_id, replica_id)
        self.running += 1
        script = self.scripts.get(replica_id, counting)
        has_ended = False
        try:
            async for delta in script(request, replica_id):
                yield delta
            has_ended = True
        except Exception:
            has_ended = True
            raise
        finally:
            self.running -= 1
            self.cancelled += not has_ended

    async def unpin(self, request: ReleasePin) -> bool:
        """They hold nothing."""
        return False

    async def inherit(self, request: InheritPin) -> HeldPrefix | None:
        """They hold nothing."""
        return None


class RouterUnderTest:
    """The real Router but for tokenizer, replicas and Serve; `async with` it."""

    def __init__(
        self,
        *,
        num_replicas: int = 2,
        tokenizer: Any = None,
        max_model_len: int = MAX_MODEL_LEN,
        place: tuple[int, int] = (0, 1),
        **config: Any,
    ) -> None:
        """tokenizer: a transformers one; None = `ByteTokenizer`. place: among the Routers, and their number.

        config: the Router's.
        """
        self._place = place
        self._info = a_replica_info(max_model_len=max_model_len)
        self.tokenizer = tokenizer or ByteTokenizer()
        self.replicas = [ReplicaId(f"replica-{index}") for index in range(num_replicas)]
        self.config = RouterConfig(
            **{"model_name": MODEL, "tokenizer": "bytes", "fingerprint": FINGERPRINT, "seed": 7, **config}
        )
        self.calls = ScriptedReplicas()

    async def __aenter__(self) -> RouterUnderTest:
        self.encoder = PromptEncoder(self.tokenizer, name="bytes", max_wait_s=self.config.max_wait_s)
        self.parts = RouterParts(
            self.config,
            calls=self.calls,
            encoder=self.encoder,
            version="0",
            peers=lambda: self._place,
        )
        self.parts.subscribers.update = lambda _replicas: None  # type: ignore[method-assign]  # no sockets
        self.parts.routing._membership_listeners.clear()
        self.parts.service.readiness = lambda: Readiness(None, len(self.parts.routing.replicas))
        self.calls.parts = self.parts
        self.parts.routing.update_replicas(dict.fromkeys(self.replicas, self._info))
        self.api = build_api(self.parts.service)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.api, raise_app_exceptions=False), base_url="http://router"
        )
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.client.aclose()
        await self.parts.aclose()

    async def chat(self, content: Any = "hello", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 5, **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 5, **fields}
        return await self.client.post("/v1/completions", json=body)

    def follow(self, script: Script) -> None:
        """Every replica does what the script says, from the next call on."""
        self.calls.scripts = dict.fromkeys(self.replicas, script)

    def say(self, *texts: str, finish: FinishReason = FinishReason.STOP) -> None:
        """Every replica answers these texts, one delta each."""
        last = len(texts) - 1
        self.answer_with(
            *(Delta(text, (index,), 0, finish if index == last else None) for index, text in enumerate(texts))
        )

    def answer_with(
        self,
        *deltas: Delta | BaseException,
        then_hang: bool = False,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Every replica sends these; an exception among them is raised there. then_hang: and never ends.

        meanwhile: what happens when it has sent them.
        """

        async def script(_request: GenerateRequest, _replica: ReplicaId) -> AsyncGenerator[Delta, None]:
            for delta in deltas:
                if isinstance(delta, BaseException):
                    raise delta
                yield delta
            meanwhile()
            if then_hang:
                await asyncio.Event().wait()

        self.follow(script)

    def metric(self, name: str, **labels: str) -> float:
        value = self.parts.metrics.registry.get_sample_value(name, labels)
        assert value is not None, f"no metric {name} {labels}"
        return value


def events_of(content: bytes) -> list[str]:
    """The data of every server-sent event; fails on anything that is not exactly one."""
    assert content.endswith(b"\n\n")
    events = content.decode().split("\n\n")[:-1]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object; fails unless it has the one shape there is."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


NO_HEADERS: Mapping[str, str] = {}


async def asgi_call(
    api: ASGIApp,
    path: str,
    body: dict[str, Any],
    disconnect: asyncio.Event,
    *,
    reads: bool = True,
    headers: Mapping[str, str] = NO_HEADERS,
) -> list[Message | Exception]:
    """The application called as a server does it; the messages sent, and what was raised, last.

    disconnect: set when the client is to be gone. reads: False for one that takes nothing that it is sent.
    """
    sent: list[Message | Exception] = []
    content = [json.dumps(body).encode()]

    async def receive() -> Message:
        if content:
            return {"type": "http.request", "body": content.pop(), "more_body": False}
        await disconnect.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        await (asyncio.sleep(0) if reads else asyncio.Event().wait())

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "server": ("router", 80), "client": ("client", 1),
    }  # fmt: skip
    try:
        await api(scope, receive, send)
    except Exception as error:
        sent.append(error)
    return sent
