"""A Router with API keys, and how their holders ask it."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.tenants.settings import TenantSettings
from tests.fakes.http import MODEL, RouterUnderTest
from tests.fakes.keys import entry, key_file

SECRET = "0123456789abcdef" * 2
PROMPT = "one prompt of several blocks"
LIMITS = {"requests_per_minute": 2, "tokens_per_minute": 10_000}
ENTRIES = [
    entry("alice", tenant="acme"),
    entry("anna", tenant="acme"),
    entry("bob"),
    entry("limited", limits=LIMITS),
    entry("single", limits={"max_concurrent": 1}),
    entry("thrifty", limits={"tokens_per_minute": 40}),
    entry("operator", operator=True),
    entry("heavy", share=3),
    entry("batch", priority=4),
    entry("front", priority=-2),
]


def settings(tmp_path: Path, **changes: Any) -> TenantSettings:
    (tmp_path / "keys.yaml").write_text(key_file(*ENTRIES))
    (tmp_path / "secret").write_text(SECRET)
    return TenantSettings(
        keys_file=str(tmp_path / "keys.yaml"), secret_file=str(tmp_path / "secret"), **changes
    )


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key of {name}"}


async def ask(router: RouterUnderTest, name: str, prompt: Any = PROMPT, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, **fields}
    return await router.client.post("/v1/completions", json=body, headers=key(name))


def code_of(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    code: str = error["code"]
    return code


def tokenize_slowly(router: RouterUnderTest, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let each prompt of the Router wait so long first."""
    encoder = router.parts.service._encoder
    encode_text = encoder.encode_text

    async def slowly(text: str, **options: Any) -> array[int]:
        await asyncio.sleep(seconds)
        return await encode_text(text, **options)

    monkeypatch.setattr(encoder, "encode_text", slowly)
