"""What is refused before a handler sees it, counted where handlers count: by endpoint and outcome.

Knows paths and the counter; knows neither keys nor bodies. Requests for pages that are no endpoint
(`/metrics`, `/dashboard`, what does not exist) are in no such series; for their keys they are in the gate's.
"""

from __future__ import annotations

from prometheus_client import Counter
from starlette.types import Scope

from router.errors import ApiError
from router.openai_api.errors import outcome_of
from router.openai_api.fields import Endpoint

_POSTED = {
    "/v1/chat/completions": Endpoint.CHAT,
    "/v1/completions": Endpoint.COMPLETIONS,
    "/v1/prefixes": Endpoint.PREFIXES,
    "/tokenize": Endpoint.TOKENIZE,
    "/detokenize": Endpoint.DETOKENIZE,
}
_DELETED_UNDER = "/v1/prefixes/"


class Door:
    """One Router's. A request that is refused here reaches no handler, so it is counted once."""

    def __init__(self, requests: Counter) -> None:
        """requests: with the labels `endpoint` and `outcome`."""
        self._requests = requests

    def refused(self, scope: Scope, error: ApiError) -> None:
        """Counts a request that ends in `error`; nothing if its path is no endpoint."""
        endpoint = endpoint_of(scope.get("method", ""), path_of(scope))
        if endpoint is not None:
            self._requests.labels(endpoint.value, outcome_of(error)).inc()


def endpoint_of(method: str, path: str) -> Endpoint | None:
    """Whose handler counts such a request; None if none does."""
    if method == "DELETE" and path.startswith(_DELETED_UNDER):
        return Endpoint.PREFIXES
    return _POSTED.get(path) if method == "POST" else None


def path_of(scope: Scope) -> str:
    """As routes see it: without the prefix that the application is mounted under."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path
