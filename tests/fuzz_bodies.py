"""Request bodies gone wrong: good ones mutated at random, and a corpus of the worst known.

A mutation follows the body's own structure, so that most of what comes out passes the first checks and
fails, if it does, deep inside. The same seed gives the same bodies.
"""

from __future__ import annotations

import copy
import json
import random
import string
from collections.abc import Iterator
from typing import Any

from router.openai_api.fields import FIELDS

_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
_CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "result"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "And now?"},
    ],
    "max_tokens": 4,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 10,
    "seed": 1,
    "stop": ["\n\n"],
    "stream": False,
    "logit_bias": {},
    "n": 1,
    "tools": [],
    "response_format": {"type": "text"},
}
# Whole blocks are held: a prefix has to have one.
_LONG = {
    "role": "system",
    "content": "You answer sailors' questions, briefly and in verse, whatever they ask.",
}
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", _CHAT),
    ("/v1/chat/completions", {**_CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**_CHAT, "tools": [_TOOL], "tool_choice": "auto"}),
    (
        "/v1/chat/completions",
        {
            **_CHAT,
            "messages": [{"role": "user", "content": "Hello"}],
            "tools": [_TOOL, {**_TOOL, "function": {**_TOOL["function"], "name": "g", "strict": True}}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "g"}}],
                },
            },
        },
    ),
    (
        "/v1/completions",
        {"model": "tiny", "prompt": "Hello there", "max_tokens": 4, "stop": "x", "echo": False},
    ),
    ("/v1/completions", {"model": "tiny", "prompt": [1, 2, 3, 400], "max_tokens": 4, "min_tokens": 2}),
    ("/v1/completions", {"model": "tiny", "prompt": ["Hello", "there"], "max_tokens": 4, "stream": True}),
    (
        "/v1/completions",
        {"model": "tiny", "prompt": [[1, 2], [3]], "max_tokens": 4, "stop_token_ids": [5], "cache_salt": "s"},
    ),
    ("/tokenize", {"model": "tiny", "prompt": "Hello there", "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "Hello"}]}),
    ("/detokenize", {"model": "tiny", "tokens": [1, 2, 3, 400]}),
    (
        "/v1/prefixes",
        {
            "model": "tiny",
            "messages": [_LONG, {"role": "user", "content": "Hello"}],
            "copies": 2,
            "seconds": 20,
        },
    ),
    (
        "/v1/prefixes",
        {"model": "tiny", "prompt": [*range(5, 45)], "copies": 1, "seconds": 20, "cache_salt": "s"},
    ),
]

POISON: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 17, 1 << 31, 1 << 63, -(1 << 63) - 1, 10**30, 0.5, -0.0, 1e308, -1e308),
    *(
        "",
        " ",
        "x",
        "\x00",
        "\u2028",
        "\ufeff",
        "🌊",
        "e\u0301" * 3,
        "<|im_end|>",
        "{{ 7 * 7 }}",
        "%s%n",
        "../../x",
    ),
    *("NaN", "1", "null", "x" * 3000, "auto", "required", "json_object"),
    *([], {}, [None], [[]], [[[[]]]], {"": None}, {"type": "text"}, {"type": "image_url"}, [-1], [1 << 40]),
    *(["x"] * 100, list(range(300)), {"a": {"b": {"c": [{}]}}}, [1, "x"], ["x", [1]], [True], [1.0]),
)


def mutated(
    count: int, seed: int, bodies: list[tuple[str, dict[str, Any]]] = GOOD
) -> Iterator[tuple[str, bytes]]:
    """(path, body) pairs, made from `bodies`."""
    rng = random.Random(seed)
    for _ in range(count):
        path, good = rng.choice(bodies)
        body = copy.deepcopy(good)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            _mutate(body, rng)
        content = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
        yield path, _damaged(content, rng) if rng.random() < 0.05 else content


def _mutate(body: dict[str, Any], rng: random.Random) -> None:
    container, key = rng.choice(list(_places(body)) or [(body, "model")])
    action = rng.random() if key in container or isinstance(container, list) else 0.0
    if action < 0.55:
        container[key] = copy.deepcopy(rng.choice(POISON))
    elif action < 0.65:
        del container[key]
    elif action < 0.75:
        container[key] = [container[key]] * rng.choice((1, 2, 20))
    elif action < 0.8:
        container[key] = str(container[key])
    else:
        name = rng.choice(FIELDS).name if rng.random() < 0.8 else "".join(rng.choices(string.printable, k=8))
        body[name] = copy.deepcopy(rng.choice(POISON))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) below `value`."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _damaged(content: bytes, rng: random.Random) -> bytes:
    """No longer JSON, mostly: cut, or with one byte replaced."""
    at = rng.randrange(len(content))
    return (
        content[:at] if rng.random() < 0.5 else content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
    )


def corpus(max_model_len: int, vocab_size: int) -> dict[str, tuple[str, bytes]]:
    """By name, bodies none of which may be answered with anything but a 4xx."""
    complete, chat, prefixes = "/v1/completions", "/v1/chat/completions", "/v1/prefixes"
    many = [{"role": "user", "content": "x"}] * 10_000

    def completion(**fields: Any) -> tuple[str, bytes]:
        body = {"model": "tiny", "prompt": "x", "max_tokens": 4, **fields}
        return complete, json.dumps(body).encode()

    def raw(value: str, field: str = "temperature") -> tuple[str, bytes]:
        return complete, f'{{"model": "tiny", "prompt": "x", "{field}": {value}}}'.encode()

    def message(**fields: Any) -> tuple[str, bytes]:
        return chat, json.dumps({"model": "tiny", "messages": [fields], "max_tokens": 4}).encode()

    def prefix(**fields: Any) -> tuple[str, bytes]:
        return prefixes, json.dumps({"model": "tiny", "copies": 1, "seconds": 20, **fields}).encode()

    return {
        "huge n": completion(n=10**18),
        "huge best_of": completion(best_of=10**18),
        "huge max_tokens": completion(max_tokens=10**18),
        "negative max_tokens": completion(max_tokens=-1),
        "NaN": raw("NaN"),
        "infinity": raw("-Infinity"),
        "1e308": raw("1e308"),
        "1e400": raw("1e400"),
        "an integer of 5000 digits": raw("9" * 5000, "seed"),
        "arrays 100,000 deep": (complete, b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "objects 100,000 deep": (complete, b'{"a":' * 100_000),
        "objects 100 deep": (complete, b'{"a":' * 100 + b"1" + b"}" * 100),
        "a lone surrogate": raw(r'"\ud800"', "user"),
        "a lone surrogate in a message": (
            chat, rb'{"model": "tiny", "messages": [{"role": "user", "content": "\udfff"}]}'
        ),
        "bytes that are no UTF-8": (chat, b'{"model": "\xff\xfe"}'),
        "UTF-16": (chat, json.dumps({"model": "tiny"}).encode("utf-16")),
        "negative ids": completion(prompt=[1, -1]),
        "ids beyond the vocabulary": completion(prompt=[vocab_size]),
        "ids beyond 32 bits": completion(prompt=[1 << 32]),
        "an empty prompt": completion(prompt=""),
        "no ids": completion(prompt=[]),
        "a list without prompts": completion(prompt=[[]]),
        "one token too long": completion(prompt=[5] * (max_model_len + 1), max_tokens=1),
        "no room for the answer": completion(prompt=[5] * max_model_len, max_tokens=1),
        "1000 prompts": completion(prompt=["x"] * 1000),
        "10,000 stops": completion(stop=["x"] * 10_000),
        "an empty stop": completion(stop=""),
        "a stop of 100,000 characters": completion(stop="x" * 100_000),
        "10,000 stop ids": completion(stop_token_ids=[1] * 10_000),
        "a salt of 100,000 characters": completion(cache_salt="x" * 100_000),
        "10,000 messages": (chat, json.dumps({"model": "tiny", "messages": many}).encode()),
        "no messages": (chat, b'{"model": "tiny", "messages": []}'),
        "a message of nothing": message(),
        "a message of numbers": message(role=1, content=2),
        "an image": message(role="user", content=[{"type": "image_url", "image_url": {"url": "file:///etc"}}]),
        "a template of the client's": (
            chat,
            json.dumps(
                {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": "x"}],
                    "chat_template": "{{ ''.__class__.__mro__ }}",
                }
            ).encode(),
        ),
        "a model's name of 100,000 characters": completion(model="x" * 100_000),
        "a prefix of nothing": prefix(messages=[]),
        "a prefix of 10,000 messages": prefix(messages=many),
        "a prefix of a lone surrogate": (
            prefixes,
            rb'{"model": "tiny", "messages": [{"role": "system", "content": "\ud800"}], "copies": 1}',
        ),
        "a prefix of negative ids": prefix(prompt=[-1] * 40),
        "a prefix of ids beyond the vocabulary": prefix(prompt=[vocab_size] * 40),
        "a prefix one block too long": prefix(prompt=[5] * (max_model_len + 16)),
        "a prefix of less than a block": prefix(prompt=[5]),
        "a prefix of prompts": prefix(prompt=[[5] * 40]),
        "a prefix of messages and ids": prefix(prompt=[5] * 40, messages=[{"role": "user", "content": "x"}]),
        "huge copies": prefix(prompt=[5] * 40, copies=10**18),
        "no copies": prefix(prompt=[5] * 40, copies=0),
        "copies beyond the fleet": prefix(prompt=[5] * 40, copies=3),
        "huge seconds": prefix(prompt=[5] * 40, seconds=10**18),
        "negative seconds": prefix(prompt=[5] * 40, seconds=-1),
        "1e308 seconds": prefix(prompt=[5] * 40, seconds=1e308),
        "a prefix's salt of 100,000 characters": prefix(prompt=[5] * 40, cache_salt="x" * 100_000),
        "twice the same key": (complete, b'{"model": "tiny", "prompt": "x", "n": 1, "n": 1000000}'),
    }  # fmt: skip
