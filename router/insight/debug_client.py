"""Asks the Routers behind one address for `/debug/route`: one of them, one that remembers, or all.

Each connection reaches one of them by chance, and each answer says how many there are. Knows HTTP and pages;
knows nothing of what a page tells, nor who reads it.
"""

from __future__ import annotations

import httpx
import msgspec

from cache.errors import ServingError
from cache.header_text import fits_header
from router.insight.debug_view import FORMAT_VERSION, DebugPage, SummaryView, merged

TOKEN_VARIABLE = "WARMPATH_DEBUG_TOKEN"  # what errors name beside --token
# Answers in a row from Routers heard before after which there are no others; so many times the number of
# Routers where one that is known of is missing, which chance alone leaves out once in 3000 times then.
_REPEATS = 8
_TIMEOUT_S = 10.0


class CannotAsk(ServingError):
    """The Router could not be asked or does not know; the message says what to do."""


def open_client(url: str, token: str | None) -> httpx.Client:
    """To be closed by whoever opens it; nothing is asked yet. Raises CannotAsk for what cannot be sent."""
    headers = {"connection": "close"}  # a new connection may reach another Router
    if token is not None:
        if not fits_header(token):
            # Said here, without the token: httpx shows the whole header, as if no server were there.
            raise CannotAsk(
                f"the token (--token, or {TOKEN_VARIABLE}) cannot be sent: it has a line end, a space before "
                "or after it, or a character that is not ASCII"
            )
        headers["authorization"] = f"Bearer {token}"
    try:
        return httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S)
    except httpx.InvalidURL as error:
        raise CannotAsk(f"--url {url} is not an address: {error}") from None


def ask(client: httpx.Client, **query: str | int) -> DebugPage:
    """The page of whichever Router it reaches. Raises CannotAsk."""
    try:
        answer = client.get("/debug/route", params=query)
    except (httpx.HTTPError, UnicodeError) as error:  # the latter of a name that cannot be looked up
        raise CannotAsk(
            f"no server answers at {client.base_url} ({error}): "
            "start one with `make serve`, or name it with --url"
        ) from None
    if answer.status_code != httpx.codes.OK:
        raise _refused(answer)
    try:
        page = msgspec.json.decode(answer.content, type=DebugPage)
    except msgspec.MsgspecError as error:
        raise CannotAsk(f"what answers at {client.base_url} is no Router of this version ({error})") from None
    if page.version != FORMAT_VERSION:
        raise CannotAsk(f"the Router's page has version {page.version}; this command reads {FORMAT_VERSION}")
    return page


class Asked:
    """Which of the Routers behind one address have answered: each connection reaches one by chance."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._num_said = 1  # what they say of their number
        self._num_known = 0  # answers in a row from Routers heard before

    def answered(self, router: str, num_routers: int) -> None:
        """router: its name. num_routers: that it knows of, itself included."""
        self._num_known = self._num_known + 1 if router in self._names else 0
        self._names.add(router)
        self._num_said = num_routers

    @property
    def num_missing(self) -> int:
        """Routers that are known of and have not answered."""
        return max(0, self._num_said - len(self._names))

    @property
    def is_enough(self) -> bool:
        """All have answered, or the others cannot be reached. All they know of is not all where two
        deployments have one address."""
        return self._num_known >= _REPEATS * (self._num_said if self.num_missing else 1)

    def __str__(self) -> str:
        if self.num_missing:
            return f"{len(self._names)} of {self._num_said} Routers"
        return "1 Router" if len(self._names) == 1 else f"{len(self._names)} Routers"


def ask_for(client: httpx.Client, request_id: str) -> DebugPage:
    """The page of one request, from whichever Router remembers it. Raises CannotAsk."""
    asked = Asked()
    while not asked.is_enough:
        try:
            return ask(client, request_id=request_id)
        except _Forgotten as error:
            asked.answered(error.router, error.num_routers)
    raise CannotAsk(
        f"{request_id} is not remembered ({asked} asked). Give the id of an answer or the x-request-id that "
        "was sent; only the latest requests are kept (debug_requests), and none that was refused before it "
        "had a replica (429, 503): warmpath_requests_total counts those."
    )


def ask_all(client: httpx.Client) -> tuple[SummaryView, Asked]:
    """The sums of every Router behind the address that can be reached, and who answered. Raises CannotAsk."""
    found: dict[str, SummaryView] = {}
    asked = Asked()
    while not asked.is_enough:
        summary = ask(client, last=0).summary
        asked.answered(summary.router, summary.num_routers)
        found[summary.router] = summary
    return merged(list(found.values())), asked


def _refused(answer: httpx.Response) -> CannotAsk:
    """What an error answer means here."""
    try:
        error = answer.json()["error"]
        code, message = error["code"], error["message"]
    except (ValueError, KeyError, TypeError):
        code, message = None, answer.text[:200]
    if code == "request_not_found":
        num_routers = answer.headers.get("x-warmpath-routers", "")
        return _Forgotten(
            answer.headers.get("x-warmpath-router", ""), int(num_routers) if num_routers.isdecimal() else 1
        )
    if code == "unknown_url":
        return CannotAsk("/debug/route is off: in deploy.yaml, under args.router, set expose_debug: true")
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        wanted = "its debug_token, or an operator's API key"
        return CannotAsk(f"the Router asks for {wanted}: give --token, or set {TOKEN_VARIABLE}")
    if answer.status_code == httpx.codes.FORBIDDEN:
        return CannotAsk("that API key opens the API only; this page needs an operator's")
    return CannotAsk(f"the server answered {answer.status_code}: {message}")


class _Forgotten(CannotAsk):
    """One Router does not remember the request; another may."""

    def __init__(self, router: str, num_routers: int) -> None:
        super().__init__(f"Router {router} does not remember the request")
        self.router = router
        self.num_routers = num_routers  # that it knows of
