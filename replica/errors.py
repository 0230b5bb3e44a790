"""The replica's part of the error tree (`cache/errors.py` holds the root and what the router decides by).

    ServingError
    ├── EngineError                  the engine itself, not one request
    │   ├── EngineStopped            closed, or its thread died (also a RequestRefused: nothing was wrong
    │   │                            with the request, another replica can take it)
    │   ├── EventSocketError         the event sockets cannot listen where they were told to
    │   ├── StepOutOfMemory          a step's forward needed more memory than there is
    │   ├── InvalidLogits            what a step computed of some of its sequences are no numbers
    │   └── EngineBroken             the runner can compute no further step: the engine ends
    │       ├── RankLost             one of the processes that compute the model together has gone
    │       │   └── RankRefused      because it cannot serve its part, as it said
    │       ├── RankSilent           one of them does not answer
    │       └── CollectiveFailed     a sum over them failed: where one has gone, for the others
    └── RequestRefused
        ├── QueueFull                from cache/errors.py, raised by the scheduler
        │   ├── WaitTooLong          not too many wait, but for too long
        │   └── NeverBegan           it has waited for far longer than was expected when it was let in
        ├── DeadlineExceeded         likewise
        ├── ForwardFailed            likewise
        ├── HandedOver               likewise, by the engine
        ├── AdmissionFailed          likewise, by the engine
        ├── RefusedEverywhere        likewise
        │   └── InvalidRequest       a value that no router of ours would send; names the field
        └── PromptTooLong            from cache/errors.py: longer than the model's own limit
            └── TooLargeForCache     shorter than that, but the whole pool could not hold it

All of them cross process borders through Ray handles: `ServingError` keeps their facts when pickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cache.errors import (
    AdmissionFailed,
    DeadlineExceeded,
    ForwardFailed,
    PromptTooLong,
    QueueFull,
    RefusedEverywhere,
    RequestRefused,
    ServingError,
)

__all__ = [
    "AdmissionFailed",
    "CollectiveFailed",
    "DeadlineExceeded",
    "EngineBroken",
    "EngineError",
    "EngineStopped",
    "EventSocketError",
    "ForwardFailed",
    "InvalidLogits",
    "InvalidRequest",
    "NeverBegan",
    "PromptTooLong",
    "QueueFull",
    "RankLost",
    "RankRefused",
    "RankSilent",
    "RequestRefused",
    "StepOutOfMemory",
    "TooLargeForCache",
    "WaitTooLong",
]


class EngineError(ServingError):
    """Something is wrong with the engine, not with one request."""


class EngineStopped(EngineError, RequestRefused):
    """The engine takes no requests any more and has dropped those it had."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine has stopped: {reason}")
        self.reason = reason


class EventSocketError(EngineError):
    """The KV event sockets could not be opened."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(
            f"event_host = {host!r}, event_port = {port}: cannot listen there ({reason}); event_host must be "
            "an address of the replica's machine, event_port 0 for free ports where replicas share one"
        )
        self.host = host
        self.port = port
        self.reason = reason


class StepOutOfMemory(EngineError):
    """A step's forward needed more memory than there is; nothing of it counts. A smaller one may fit."""

    def __init__(self, num_tokens: int, cause: str) -> None:
        super().__init__(f"a step of {num_tokens} tokens ran out of memory: {cause}")
        self.num_tokens = num_tokens
        self.cause = cause


class InvalidLogits(EngineError):
    """The model returned NaN for some sequences of a step, which fail instead of answering noise. What it
    returned for the others is theirs."""

    def __init__(self, places: Sequence[int]) -> None:
        """places: of those sequences, in the step, or in the rows drawn from."""
        super().__init__(f"NaN in the logits of {len(places)} of the step's sequences")
        self.places = tuple(places)

    def at(self, places: Mapping[int, int]) -> InvalidLogits:
        """The same, told by other places: of those that have one."""
        return InvalidLogits([places[place] for place in self.places if place in places])


class EngineBroken(EngineError):
    """A step failed in a way after which no other can be computed. The engine thread dies of it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RankLost(EngineBroken):
    """A process that has a part of the model ended before it was told to, or is about to."""

    def __init__(self, rank: int, exit_code: int | None, cause: str | None = None) -> None:
        """exit_code: None where it has not ended yet. cause: what it said itself, which most cannot."""
        how = f", with exit code {exit_code}" if cause is None else f": {cause}"
        super().__init__(f"rank {rank} of the model has gone{how}")
        self.rank = rank
        self.exit_code = exit_code
        self.cause = cause


class RankRefused(RankLost):
    """A process found that it cannot serve its part of the model."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(rank, None, cause)
        self.args = (f"rank {rank} cannot serve its part: {cause}",)


class RankSilent(EngineBroken):
    """A process that loads its part of the model has not answered for as long as the others wait for it."""

    def __init__(self, rank: int, limit_s: float) -> None:
        super().__init__(
            f"rank {rank} of the model has not answered for {limit_s:g} s: it stands still, or "
            "warm_up_time_limit_s, which is this limit, must be more than it takes longer to load than rank 0"
        )
        self.rank = rank
        self.limit_s = limit_s


class CollectiveFailed(EngineBroken):
    """A sum over the ranks, or their meeting, did not come about."""

    def __init__(self, rank: int, cause: str, limit_s: float) -> None:
        super().__init__(
            f"rank {rank} has lost the other ranks, or waited longer for one than warm_up_time_limit_s, "
            f"{limit_s:g} s: {cause}"
        )
        self.rank = rank
        self.cause = cause
        self.limit_s = limit_s

    @classmethod
    def behind(cls, error: BaseException) -> CollectiveFailed | None:
        """`error`, or what it was raised from: who tries a model's forward wraps whatever that raises."""
        link: BaseException | None = error
        while link is not None and not isinstance(link, cls):
            link = link.__cause__
        return link


class InvalidRequest(RefusedEverywhere):
    """A request's value cannot be computed with. The router's edge should have caught it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class TooLargeForCache(PromptTooLong):
    """Prompt and output together need more blocks than the whole pool has: it would never finish."""

    def __init__(self, prompt_tokens: int, output_tokens: int, num_blocks: int, block_size: int) -> None:
        limit = num_blocks * block_size
        super().__init__(prompt_tokens, limit)
        self.args = (
            f"{prompt_tokens} prompt tokens and up to {output_tokens} output tokens do not fit the KV cache "
            f"of {limit} tokens ({num_blocks} blocks of {block_size})",
        )
        self.output_tokens = output_tokens
        self.num_blocks = num_blocks
        self.block_size = block_size


class WaitTooLong(QueueFull):
    """Those that wait keep the engine busy for longer than it lets anybody wait."""

    def __init__(self, waiting: int, limit: int, wait_s: float, limit_s: float) -> None:
        super().__init__(waiting, limit)
        self.wait_s = wait_s
        self.limit_s = limit_s

    @property
    def retry_after_s(self) -> float:
        """When there will be room, if nobody comes."""
        return self.wait_s - self.limit_s

    def __str__(self) -> str:
        return (
            f"{self.waiting} requests take {self.wait_s:.1f} s, nobody waits longer than {self.limit_s:.1f} s"
        )


class NeverBegan(QueueFull):
    """It was let in, and those before it have kept the engine for far longer than was expected then."""

    def __init__(self, waiting: int, limit: int, waited_s: float, limit_s: float) -> None:
        super().__init__(waiting, limit)
        self.waited_s = waited_s
        self.limit_s = limit_s

    def __str__(self) -> str:
        return f"it has waited {self.waited_s:.1f} s and not begun; nobody waits over {self.limit_s:.1f} s"
