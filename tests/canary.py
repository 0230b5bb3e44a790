"""A text that must not come out where it did not go in, sent through every field that takes one.

`provoke` sends it in requests that succeed and in ones that fail at every stage, and looks at the errors;
`traces_of` finds it in whatever else a server writes or shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from tests.http_server import MODEL

CANARY = "canary7Zq4 sings"
_MAX_FILE_BYTES = 64 << 20
_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_PREFIXES = "/v1/prefixes"


def marks(client: httpx.Client) -> list[bytes]:
    """What gives the canary away: its words, and its token ids as lists are printed."""
    ids = client.post("/tokenize", json={"prompt": CANARY, "add_special_tokens": False}).json()["tokens"]
    middle = [str(each) for each in ids[1:-1]]  # its ends may be joined with what is around it
    assert len(middle) > 3
    return [b"canary7Zq4", ", ".join(middle).encode(), ",".join(middle).encode()]


def provoke(client: httpx.Client) -> int:
    """Sends it everywhere. Returns how many requests were refused; fails if a refusal quotes it."""
    num_refused = 0
    for path, content in _requests():
        with client.stream("POST", path, content=content) as answer:
            status, text = answer.status_code, answer.read()
        assert status < 500, (path, content[:200], text)
        if status >= 400:
            num_refused += 1
            assert b"canary7Zq4" not in text, (path, content[:200], text)
            assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}
    return num_refused


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def _requests() -> list[tuple[str, bytes]]:
    said = {"model": MODEL, "messages": [{"role": "user", "content": CANARY}], "max_tokens": 3}
    asked = {"model": MODEL, "prompt": CANARY, "max_tokens": 3}
    tool = {"type": "function", "function": {"name": "f", "description": CANARY}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (_CHAT, said),
        (_CHAT, {**said, "stream": True, "stop": [CANARY], "user": CANARY, "metadata": {"a": CANARY}}),
        (_CHAT, {**said, "messages": [{"role": "user", "content": [{"type": "text", "text": CANARY}]}]}),
        (_CHAT, {**said, "prompt_cache_key": CANARY, "cache_salt": CANARY, "safety_identifier": CANARY}),
        (_CHAT, {**said, CANARY: CANARY, "extra": {CANARY: [CANARY]}}),
        (_COMPLETIONS, {**asked, "prompt": [CANARY, f"{CANARY} {CANARY}"], "stream": True}),
        (_COMPLETIONS, {**asked, "prompt": f"{CANARY} " * 20, "stop": CANARY}),
        ("/tokenize", {"prompt": CANARY}),
        ("/tokenize", {"messages": said["messages"]}),
        (_PREFIXES, {"model": MODEL, "messages": [{"role": "system", "content": f"{CANARY} " * 20}]}),
        (_PREFIXES, {"model": MODEL, "prompt": f"{CANARY} " * 20, "cache_salt": CANARY, "seconds": 30}),
        # From here on: refused.
        (_PREFIXES, {"model": MODEL, "prompt": f"{CANARY} " * 20, "copies": CANARY}),
        (_PREFIXES, {"model": MODEL, "prompt": f"{CANARY} " * 20, "copies": 64}),
        (_PREFIXES, {"model": MODEL, "prompt": {"text": CANARY}}),
        (_PREFIXES, {"model": CANARY[:3], "prompt": [CANARY]}),
        (_PREFIXES, {"model": MODEL, "messages": [{"role": CANARY, "content": CANARY}], "cache_salt": 1}),
        (_CHAT, {**said, "tools": [tool], "tool_choice": CANARY}),
        (_CHAT, {**said, "tools": [{**tool, "type": CANARY}]}),
        (_CHAT, {**said, "tools": CANARY}),
        (_CHAT, {**said, "messages": CANARY}),
        (_CHAT, {**said, "messages": [{"role": CANARY, "content": "x"}]}),
        (_CHAT, {**said, "messages": [{"role": "user", "content": {"text": CANARY}}]}),
        (_CHAT, {**said, "messages": [{"role": "user", "content": [{"type": CANARY, "text": CANARY}]}]}),
        (_CHAT, {**said, "response_format": {"type": "json_schema", "json_schema": CANARY}}),
        (_CHAT, {**said, "response_format": _schema({"type": "string", "pattern": f"({CANARY}"})}),
        (
            _CHAT,
            {**said, "response_format": _schema({"type": "array", "uniqueItems": True, "title": CANARY})},
        ),
        (_CHAT, {**said, "response_format": _schema({"enum": [CANARY], "type": CANARY})}),
        (_CHAT, {**said, "structured_outputs": {"regex": f"(?={CANARY})"}}),
        (_CHAT, {**said, "chat_template": CANARY}),
        (_CHAT, {**said, "max_tokens": CANARY}),
        (_CHAT, {**said, "stream": CANARY}),
        (_CHAT, {**said, "stream": True, "stream_options": {"include_usage": CANARY}}),
        (_CHAT, {**said, "messages": [{"role": "user", "content": f"{CANARY} " * 4_000}]}),
        (_CHAT, {**said, "cache_salt": CANARY * 200}),
        (_COMPLETIONS, {**asked, "stop": [CANARY] * 50}),
        (_COMPLETIONS, {**asked, "stop": CANARY * 100}),
        (_COMPLETIONS, {**asked, "prompt": [1, CANARY]}),
        (_COMPLETIONS, {**asked, "prompt": {"text": CANARY}}),
        (_COMPLETIONS, {**asked, "suffix": CANARY}),
        (_COMPLETIONS, {**asked, "temperature": CANARY, "seed": CANARY, "logit_bias": {CANARY: 1}}),
        (_COMPLETIONS, {**asked, "guided_regex": CANARY, "bad_words": [CANARY]}),
        (_COMPLETIONS, {**asked, "guided_grammar": f"start: {CANARY}"}),
        (_COMPLETIONS, {**asked, "guided_grammar": f"root ::= ({CANARY}"}),
        (_COMPLETIONS, {**asked, "guided_json": f'{{"$ref": "#/{CANARY}"}}'}),
        ("/tokenize", {"prompt": [CANARY]}),
        ("/detokenize", {"tokens": [CANARY]}),
    ]
    broken = [
        f'{{"model": "{MODEL}", "prompt": "{CANARY}"',
        f'{{"model": "{MODEL}", "prompt": "{CANARY}" "{CANARY}"}}',
        f'["{CANARY}"]',
        f"{CANARY}",
        f'{{"prompt": "{CANARY}\\ud800"}}',
        '{"a":' * 100 + f'"{CANARY}"' + "}" * 100,
    ]
    requests = [(path, json.dumps(body).encode()) for path, body in bodies]
    return requests + [(_CHAT, text.encode()) for text in broken] + [(_CHAT, CANARY.encode() + b"\xff")]


def traces_of(found: list[bytes], folder: Path) -> list[str]:
    """Places below `folder` where one of them is written."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [place for path in files for place in _places(found, path)]


def _places(found: list[bytes], path: Path) -> list[str]:
    try:
        content = path.read_bytes() if path.stat().st_size <= _MAX_FILE_BYTES else b""
    except OSError:  # gone already
        return []
    spots = [at for mark in found if (at := content.find(mark)) >= 0]
    return [f"{path}: {content[max(0, at - 80) : at + 80]!r}" for at in spots]
