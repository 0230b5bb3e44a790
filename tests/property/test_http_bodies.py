"""Whatever a client sends, the answer is never a 5xx, and every refusal has the one error shape."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import InvalidField
from router.limits import Limits
from router.openai_api.fields import FIELDS
from router.openai_api.prefixes import PrefixBody, parse_prefix
from tests.fakes.http import MODEL, RouterUnderTest

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from([10**30, -(10**30), 10**400, 1e308, "", "\u2028", MODEL])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]) | scalars}
    ).flatmap(lambda message: values.map(lambda content: {**message, "content": content})),
    max_size=3,
)
prompts = (
    st.text(max_size=30)
    | st.lists(st.integers(-1, 300), max_size=5)
    | st.lists(st.text(max_size=4) | st.lists(st.integers(-1, 300), max_size=3), max_size=3)
)
plausible = st.fixed_dictionaries(
    {},
    optional={
        "model": st.just(MODEL) | scalars,
        "messages": messages | values,
        "prompt": prompts | values,
        "stream": st.booleans() | scalars,
        "max_tokens": st.integers(-1, 10) | scalars,
        **{
            field.name: st.sampled_from([*field.neutral, None]) | values
            for field in FIELDS
            if field.name not in ("model", "messages", "prompt", "stream", "max_tokens")
        },
    },
)


class Asked:
    """One Router that is asked everything: building it takes longer than any answer."""

    def __init__(self, runner: asyncio.Runner, router: RouterUnderTest) -> None:
        self._runner, self._router = runner, router

    def check(self, path: str, content: bytes) -> None:
        _check(*self._runner.run(self._post(path, content)))

    async def _post(self, path: str, content: bytes) -> tuple[int, bytes, str]:
        answer = await self._router.client.post(path, content=content)
        assert self._router.calls.running == 0
        assert self._router.parts.routing.statistics().in_flight == 0
        return answer.status_code, answer.content, answer.headers["content-type"]


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    with asyncio.Runner() as runner:
        router = runner.run(RouterUnderTest().__aenter__())
        yield Asked(runner, router)
        runner.run(router.__aexit__())


paths = st.sampled_from(["/v1/chat/completions", "/v1/completions"])


@settings(max_examples=150)
@given(path=paths, body=st.dictionaries(st.text(max_size=8), values, max_size=3) | plausible | values)
def test_arbitrary_json_is_never_a_5xx(asked: Asked, path: str, body: Any) -> None:
    asked.check(path, json.dumps(body).encode())


@settings(max_examples=150)
@given(path=paths, name=st.sampled_from([field.name for field in FIELDS]), value=values)
def test_one_odd_field_in_a_good_body_is_never_a_5xx(asked: Asked, path: str, name: str, value: Any) -> None:
    good = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "prompt": "x",
        "max_tokens": 3,
    }
    asked.check(path, json.dumps({**good, name: value}).encode())


@settings(max_examples=500)
@given(
    name=st.sampled_from([*PrefixBody.model_fields, "temperature"]),
    value=values | messages | prompts,
    good=st.sampled_from(
        [{"messages": [{"role": "system", "content": "x"}]}, {"prompt": "x"}, {"prompt": [1, 2]}]
    ),
)
def test_one_odd_field_of_a_prefix_is_read_or_named(name: str, value: Any, good: dict[str, Any]) -> None:
    body = {"model": MODEL, "copies": 1, "seconds": 60, **good, name: value}
    with contextlib.suppress(InvalidField):
        assert isinstance(parse_prefix(json.loads(json.dumps(body)), Limits()), PrefixBody)


@settings(max_examples=100)
@given(path=paths, content=st.binary(max_size=200))
def test_arbitrary_bytes_are_never_a_5xx(asked: Asked, path: str, content: bytes) -> None:
    asked.check(path, content)


def _check(status: int, content: bytes, kind: str) -> None:
    assert status in (200, 400, 404), content
    if status != 200:
        error = json.loads(content)["error"]
        assert set(error) == {"message", "type", "param", "code"}
    elif kind.startswith("text/event-stream"):
        assert content.endswith(b"data: [DONE]\n\n")
