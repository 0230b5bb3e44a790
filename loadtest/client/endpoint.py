"""Where requests go: an OpenAI-compatible server's address, its key, and the model it serves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from cache.header_text import fits_header
from loadtest.client.errors import BadKey, KeyNeeded, Unreachable
from loadtest.client.question import Question

KEY_VARIABLE = "OPENAI_API_KEY"
SESSION_HEADER = "x-session-id"
_LOOK_TIMEOUT_S = 30.0
_REFUSED = (401, 403)
_PLAIN = " !#$&'()*+,/:;=?@[]|"  # beside letters and digits: what a header carries as it is


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server. `url` without the `/v1`."""

    url: str
    model: str
    key: str | None = None

    @classmethod
    def find(cls, url: str, *, key: str | None = None, model: str | None = None) -> Endpoint:
        """Ask the server which model it serves, unless told; its first if it has several.

        url: with or without `/v1`. key: None = the environment's. With a model only the address and the key
        are looked at: a server need not list what it serves. Raises Unreachable, KeyNeeded or BadKey.
        """
        url = url.rstrip("/").removesuffix("/v1")
        key = key or os.environ.get(KEY_VARIABLE) or None
        if key is not None and not fits_header(key):
            raise BadKey(KEY_VARIABLE)
        answer = _models(url, key, may_be_missing=model is not None)
        return cls(url, model or _first(url, answer), key)

    def headers(self, question: Question) -> dict[str, str]:
        headers = dict(question.headers)
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        if question.session is not None:
            headers[SESSION_HEADER] = quote(question.session, safe=_PLAIN)  # a trace's name may be in it
        return headers

    def body(self, question: Question) -> Mapping[str, Any]:
        return {"model": self.model, **question.body}


def _models(url: str, key: str | None, *, may_be_missing: bool) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=_LOOK_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # the last of a name of no host
        raise Unreachable(url, str(error) or type(error).__name__) from None
    if answer.status_code in _REFUSED:
        raise KeyNeeded(url, KEY_VARIABLE, had_one=key is not None)
    if not answer.is_success and not (may_be_missing and answer.is_client_error):
        raise Unreachable(url, f"/v1/models answered {answer.status_code}")
    return answer


def _first(url: str, answer: httpx.Response) -> str:
    try:
        return str(answer.json()["data"][0]["id"])
    except (LookupError, TypeError, ValueError):
        raise Unreachable(url, "/v1/models lists no model") from None
