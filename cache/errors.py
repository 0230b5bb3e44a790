"""The root of every error the project raises on purpose, and the cache's part of the tree.

    ServingError
    ├── ConfigError            a setting is wrong; raised before anything starts
    ├── NoFreeBlocks           the pool cannot give the blocks asked for
    ├── StaleHit               a prefix hit was evicted between lookup and admission; look up again
    ├── BlocksAwaited          a sequence was to be released while its step's blocks are awaited by others
    ├── BlocksInUse            the cache was to be cleared while sequences hold blocks
    ├── WireError              bytes from a socket that do not decode to what was promised
    ├── LeftUnread             too much of an answer lies unread: its client's doing, on any replica
    ├── RequestRefused         a replica will not finish this request; the router decides what to do by type
    │   ├── QueueFull          too many wait there already: another replica may have room
    │   ├── PromptTooLong      no replica of this model could take it
    │   ├── DeadlineExceeded   the request's own time ran out, waiting or running
    │   ├── RefusedEverywhere  for a value of its own: every replica of this version would refuse it
    │   ├── AdmissionFailed    taking it in failed of itself, before anything was kept of it
    │   ├── StructureRefused   what its output has to be is too complex, or cannot be followed here
    │   ├── PinsFull           a prefix to be held does not fit beside those that are
    │   ├── HandedOver         the replica is leaving: nothing is wrong with it or with the request
    │   ├── PiecesLost         pieces of its stream may be lost: nothing is wrong with either end
    │   └── ForwardFailed      the step it was part of raised; its blocks are freed, the replica lives
    ├── replica/errors.py      EngineError, ...
    └── router/errors.py       ApiError, NoReplica, ...

Knows nothing of HTTP: the router chooses status codes at its edge.
"""

from __future__ import annotations

import math
from datetime import date
from typing import Any, ClassVar


class ServingError(Exception):
    """Root of the tree. Survives pickling whatever a subclass's constructor looks like.

    Errors cross process borders (a replica's error reaches its client through a handle), and the
    default `BaseException.__reduce__` would call the constructor with the message alone.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(kind: type[ServingError], args: tuple[Any, ...], facts: dict[str, Any]) -> ServingError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(facts)
    return error


def as_yaml(value: object) -> str:
    """A value as a file of settings spells it, where Python does otherwise."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return value.isoformat() if isinstance(value, date) else repr(value)


HIDDEN = "(hidden)"  # stands for a secret in errors, which end up in logs


class ConfigError(ServingError):
    """A setting has a value it cannot have: names the field, the value and what would be accepted."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        super().__init__(f"{field} = {as_yaml(value)}: {accepted}")
        self.field = field
        self.value = value
        self.accepted = accepted


class NoFreeBlocks(ServingError):
    """The block pool has fewer free blocks than asked for; nothing was allocated."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"needed {needed} free blocks, have {free}")
        self.needed = needed
        self.free = free


class StaleHit(ServingError):
    """A block of a prefix hit no longer holds what it held at lookup; nothing was taken."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(f"a hit of {num_blocks} blocks was evicted in part since its lookup")
        self.num_blocks = num_blocks


class BlocksAwaited(ServingError):
    """Another sequence of the same step reads blocks this one has yet to compute; nothing was released."""

    def __init__(self) -> None:
        super().__init__("its uncomputed blocks are shared in this step: release it after the step's commit")


class BlocksInUse(ServingError):
    """The cache cannot be cleared while sequences hold blocks; nothing was cleared."""

    def __init__(self, used: int) -> None:
        super().__init__(f"{used} blocks are in use")
        self.used = used


class WireError(ServingError):
    """A message from a socket is malformed, too large, or of another format version."""


class LeftUnread(ServingError):
    """More of an answer was generated than is kept for whoever does not read it; the rest is not.

    No RequestRefused: every other replica would have to wait for the same reader.
    """

    def __init__(self, unread_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"The answer was not read: {unread_bytes} bytes of it were waiting for its client, "
            f"the limit is {limit_bytes}."
        )
        self.unread_bytes = unread_bytes
        self.limit_bytes = limit_bytes


class RequestRefused(ServingError):
    """A replica will not finish this request. Base of what crosses the border back to the router.

    Declared here because `router` and `replica` never import each other: the replica raises a
    subclass, the router decides by type (try elsewhere, or which status code).
    """

    may_have_begun: ClassVar[bool] = True  # at an engine, which then tells of its end (`RequestEnded`)


class QueueFull(RequestRefused):
    """The replica's waiting queue is at its limit; nothing was computed for this request."""

    may_have_begun = False

    def __init__(self, waiting: int, limit: int) -> None:
        super().__init__(f"{waiting} requests are waiting, the limit is {limit}")
        self.waiting = waiting
        self.limit = limit


class PromptTooLong(RequestRefused):
    """The request could never fit this replica: its tokens exceed what one sequence may hold."""

    may_have_begun = False

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(f"the prompt has {prompt_tokens} tokens, the limit is {limit}")
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class DeadlineExceeded(RequestRefused):
    """The request's `deadline_s` passed before its last token, or will have before its first.

    Numbers count from when whoever raises it heard of the request; clients are told them from its arrival.
    prefill_s: what its prompt would take, of one that was not begun for that.
    """

    def __init__(self, deadline_s: float, waited_s: float, prefill_s: float | None = None) -> None:
        done = "not finished" if prefill_s is None else f"its prompt of about {prefill_s:.3f} s not begun"
        super().__init__(f"{done} {waited_s:.3f} s after arrival, the deadline was {deadline_s:.3f} s")
        self.deadline_s = deadline_s
        self.waited_s = waited_s
        self.prefill_s = prefill_s


class HandedOver(RequestRefused):
    """The replica is leaving and will not finish this request: another one goes on from where it is."""

    def __init__(self) -> None:
        super().__init__("the replica is leaving; another one can go on with this request")


class PiecesLost(RequestRefused):
    """The connection that this request's pieces took is gone, and some of them with it. Of a replica's deltas
    whoever has the others goes on from there, on any replica."""

    def __init__(self) -> None:
        super().__init__("the connection that its pieces took was lost")


class ForwardFailed(RequestRefused):
    """The model's forward raised in a step this request was part of. `reason` never quotes a prompt."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the model's forward failed: {reason}")
        self.reason = reason


class RefusedEverywhere(RequestRefused):
    """What is refused is the request's own: another replica would say the same."""


class AdmissionFailed(RequestRefused):
    """What nobody foresaw went wrong while a request was taken in. `reason` never quotes it."""

    may_have_begun = False

    def __init__(self, reason: str) -> None:
        super().__init__(f"the request could not be taken in: {reason}")
        self.reason = reason


class StructureRefused(RequestRefused):
    """The structure of its output cannot be followed, or no further. `reason` never quotes it."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the output's structure is refused: {reason}")
        self.reason = reason


class PinsFull(RequestRefused):
    """A prefix to be held needs more blocks than pins may still take; nothing was taken."""

    def __init__(self, needed: int, left: int) -> None:
        super().__init__(f"the pin needs {needed} blocks, {left} are left for pins")
        self.needed = needed
        self.left = left
