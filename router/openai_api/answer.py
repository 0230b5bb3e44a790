"""One request being answered: its generations' deltas, as one stream of events or one whole object.

Knows generations and codecs; knows neither bodies' fields nor how requests are placed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from cache.errors import DeadlineExceeded
from router.dispatch.generation import Generation
from router.openai_api.codec import Choice, Codec, event_stream, whole_answer
from router.openai_api.fields import Endpoint
from router.openai_api.schema import RequestBody
from router.openai_api.streams import Indexed, merge
from router.tenants.allowance import Visit


class Answer:
    """One request being answered: iterate `events()` or await `whole()`, once, then `aclose`."""

    def __init__(
        self,
        endpoint: Endpoint,
        body: RequestBody,
        codec: Codec,
        choices: Sequence[Choice],
        generations: Sequence[Generation],
        on_first_token: Callable[[], None],
        visit: Visit,
        is_deadline_clients: bool,
    ) -> None:
        """visit: whose request it is; its prompts' tokens are given back there if it fails early.

        is_deadline_clients: see the function of that name.
        """
        self.endpoint = endpoint
        self.is_stream = body.stream
        self.generations = generations
        self._body = body
        self._codec = codec
        self._choices = choices
        self._on_first_token = on_first_token
        self._visit = visit
        self._is_deadline_clients = is_deadline_clients
        self._deltas = merge([generation.deltas() for generation in generations], body.n)

    async def whole(self) -> bytes:
        """The JSON object, when everything is generated. Raises ServingError."""
        return await whole_answer(self._codec, self._choices, self._timed())

    def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, `[DONE]` last. Raises ServingError, then yields no more."""
        return event_stream(
            self._codec,
            self._choices,
            self._timed(),
            include_usage=self._body.include_usage,
            continuous_usage=self._body.continuous_usage,
        )

    async def aclose(self) -> None:
        """Cancels what still runs. Idempotent."""
        await self._deltas.aclose()

    async def _timed(self) -> AsyncGenerator[Indexed, None]:
        is_first = True
        try:
            async with aclosing(self._deltas):
                async for item in self._deltas:
                    if is_first:
                        self._on_first_token()
                        is_first = False
                    yield item
        except BaseException as error:
            if is_first and not (self._is_clients_doing(error) and self._was_accepted()):
                self._visit.refund()
            raise

    def _is_clients_doing(self, error: BaseException) -> bool:
        """It left, which is a cancellation here, or its own deadline passed. With a replica at work that is
        charged: else a client in a hurry has prompts computed for nothing."""
        if isinstance(error, DeadlineExceeded):
            return self._is_deadline_clients
        return not isinstance(error, Exception)

    def _was_accepted(self) -> bool:
        return any(generation.was_accepted for generation in self.generations)


def is_deadline_clients(timeout_s: float | None, most_s: float | None) -> bool:
    """Whether a request's deadline is its client's wish, and not everybody's. None: there is none."""
    return timeout_s is not None and (most_s is None or timeout_s < most_s)


def choices_of(n: int, index: int, begin: Callable[[int], Choice]) -> list[Choice]:
    """Of the prompt at this index. Its tokens are counted once, however many answers it has."""
    first, *others = [begin(index) for _ in range(n)]
    for other in others:
        other.prompt_tokens = 0
    return [first, *others]
