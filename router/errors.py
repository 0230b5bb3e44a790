"""The router's part of the error tree (`cache/errors.py` holds the root).

    ServingError
    ├── RoutingError                 a request cannot be placed
    │   ├── NoReplica                none is alive (or all are excluded)
    │   ├── AllBusy                  some are alive, none has room: try again after `retry_after_s`
    │   ├── ReplicaLost              it died, or broke off, under this request; caught by the router itself
    │   ├── RouterLeaves             this Router's time is over before any replica could take it: try again
    │   └── TooManyDeaths            so many replicas died under this request that it is the suspect
    ├── AnswerNotTaken               its client stays and takes nothing of it
    ├── RouterUnheard                another Router may keep what is asked for, and does not answer: try again
    ├── PromptsBusy                  others' prompts are to be tokenized before this request's: try again
    ├── BodiesBusy                   other requests' large bodies are to be worked on first: try again
    ├── StructuresBusy               too many structures are to be tried before this request's: try again
    └── ApiError                     the client's request is wrong; names the field where there is one
        ├── MalformedJson
        ├── HeadersTooLarge
        ├── BodyTooLarge
        ├── BodyTooSlow              its next part did not come in time
        ├── UnknownModel
        ├── InvalidApiKey            none was sent, or nobody's
        ├── NotPermitted             a key that does not open this path
        ├── RateLimitExceeded        its key has no more left: try again after `retry_after_s`
        ├── PrefixDoesNotFit         what replicas hold leaves too little room; names both numbers
        ├── PrefixLimitReached       its key's prefixes leave too little; names both numbers
        ├── PrefixCachingOff         nothing is held here
        ├── PrefixNotFound           no such prefix, or somebody else's
        ├── InvalidField
        │   ├── UnsupportedParameter known to the API, not implemented here
        │   ├── PromptTooLong        names both numbers and the limit
        │   └── PromptFarTooLong     names the limit; nobody counted the rest
        └── NoChatTemplate           a chat was asked of a tokenizer that has no template

Knows nothing of HTTP: status codes are chosen in `openai_api/errors.py`. Messages are shown to
clients, so they say what to change and never quote a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from cache.counted import counted
from cache.errors import ServingError


class RoutingError(ServingError):
    """A request cannot be placed on any replica now."""

    may_have_begun: ClassVar[bool] = False  # as `RequestRefused` has it: nobody has taken it


class NoReplica(RoutingError):
    """No replica is alive for this request."""

    def __init__(self, num_known: int = 0, num_excluded: int = 0) -> None:
        detail = f"{num_known} known, {num_excluded} excluded" if num_known else "none has started"
        super().__init__(f"no replica can take this request ({detail})")
        self.num_known = num_known
        self.num_excluded = num_excluded


class AllBusy(RoutingError):
    """Replicas are alive, but none has room for this request now."""

    def __init__(self, num_replicas: int, retry_after_s: float) -> None:
        super().__init__(f"every replica is busy ({num_replicas} known); try again in {retry_after_s:.0f} s")
        self.num_replicas = num_replicas
        self.retry_after_s = retry_after_s


class RouterLeaves(RoutingError):
    """This Router has had its time for what it had begun, and the request still waited for a replica."""

    def __init__(self) -> None:
        super().__init__("the router that had this request leaves; nothing was done for it: try again")


class ReplicaLost(RoutingError):
    """The replica died, became unreachable or ended its stream early. The router tries elsewhere."""

    may_have_begun = True

    def __init__(self, detail: str) -> None:
        super().__init__(f"the replica was lost: {detail}")
        self.detail = detail


class TooManyDeaths(RoutingError):
    """Replicas died under this request; it is refused rather than given another to kill."""

    def __init__(self, request_id: str, deaths: int) -> None:
        super().__init__(
            f"request {request_id} was running when {counted(deaths, 'replica')} died; not retried"
        )
        self.request_id = request_id
        self.deaths = deaths


class AnswerNotTaken(ServingError):
    """A client has its connection open and takes nothing of its stream."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"The answer was not read: nothing of it was taken for {limit_s:g} seconds.")
        self.limit_s = limit_s


class RouterUnheard(ServingError):
    """What is asked for is not known here, and a Router that may know it has not answered."""

    def __init__(self) -> None:
        super().__init__("another router may know of it and does not answer; try again")


class PromptsBusy(ServingError):
    """The request's prompt has waited too long to be tokenized; nothing was done for it."""

    def __init__(self, num_pending: int) -> None:
        super().__init__(f"{counted(num_pending, 'other prompt')} to be tokenized first; try again later")
        self.num_pending = num_pending


class BodiesBusy(ServingError):
    """The request's body is large, and others' take all the room for those; nothing was done for it."""

    def __init__(self) -> None:
        super().__init__("other large requests are to be read first; try again later")


class StructuresBusy(ServingError):
    """The request's structure would wait too long until it is known whether it can be followed."""

    def __init__(self, num_pending: int) -> None:
        super().__init__(f"{num_pending} other schemas or grammars are to be checked first; try again later")
        self.num_pending = num_pending


class ApiError(ServingError):
    """The client's request is wrong. `param` names the field, `code` the kind, as the OpenAI API does."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class MalformedJson(ApiError):
    """The body is not JSON, or not a JSON object."""

    def __init__(self, detail: str) -> None:
        super().__init__(f"The body is not valid JSON: {detail}", code="malformed_json")


class BodyTooLarge(ApiError):
    """The body is larger than the Router reads. `size_bytes` is None when it was cut off while reading."""

    def __init__(self, limit_bytes: int, size_bytes: int | None = None) -> None:
        size = "more than" if size_bytes is None else f"{size_bytes} bytes, above"
        super().__init__(f"The body has {size} the limit of {limit_bytes} bytes.", code="body_too_large")
        self.limit_bytes = limit_bytes
        self.size_bytes = size_bytes


class BodyTooSlow(ApiError):
    """The rest of the body was not here in time; `num_bytes` of it were."""

    def __init__(self, num_bytes: int, max_pause_s: float, least_bytes_per_s: int) -> None:
        super().__init__(
            f"The body stopped after {num_bytes} bytes: it may pause for {max_pause_s:g} s, and has to come "
            f"at {least_bytes_per_s} bytes per second on average.",
            code="body_too_slow",
        )
        self.num_bytes = num_bytes
        self.max_pause_s = max_pause_s
        self.least_bytes_per_s = least_bytes_per_s


class HeadersTooLarge(ApiError):
    """The request's headers are larger than the Router takes."""

    def __init__(self, limit_bytes: int, size_bytes: int) -> None:
        super().__init__(
            f"The headers have {size_bytes} bytes, above the limit of {limit_bytes} bytes.",
            code="headers_too_large",
        )
        self.limit_bytes = limit_bytes
        self.size_bytes = size_bytes


class UnknownModel(ApiError):
    """The body's `model` is not served here."""

    def __init__(self, model: str, served: Sequence[str] = ()) -> None:
        known = f" This server has: {', '.join(served)}." if served else ""
        super().__init__(
            f"The model {model[:200]!r} does not exist.{known}", param="model", code="model_not_found"
        )
        self.model = model


class InvalidApiKey(ApiError):
    """No key was sent, or one that nobody has: which of the two is nobody's business."""

    def __init__(self) -> None:
        super().__init__(
            "No valid API key: send one as `Authorization: Bearer <key>`.", code="invalid_api_key"
        )


class NotPermitted(ApiError):
    """The key opens the API, not this path."""

    def __init__(self) -> None:
        super().__init__("This path needs an operator's API key.", code="insufficient_permissions")


class RateLimitExceeded(ApiError):
    """The key has used up one of its limits for now."""

    def __init__(self, limit: str, retry_after_s: float) -> None:
        """limit: in words, with its number."""
        super().__init__(
            f"This API key's limit of {limit} is reached; try again in {max(1, math.ceil(retry_after_s))} s.",
            code="rate_limit_exceeded",
        )
        self.limit = limit
        self.retry_after_s = retry_after_s


class InvalidField(ApiError):
    """A field has a wrong type or value."""

    def __init__(self, param: str | None, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(message, param=param, code=code)


class UnsupportedParameter(InvalidField):
    """A field the API knows and this server does not implement: named, never ignored."""

    def __init__(self, param: str, message: str | None = None) -> None:
        super().__init__(
            param, message or f"{param!r} is not supported by this server.", code="unsupported_parameter"
        )


class PromptTooLong(InvalidField):
    """Prompt and completion together do not fit the model's context."""

    def __init__(self, prompt_tokens: int, max_tokens: int, limit: int, *, param: str = "messages") -> None:
        super().__init__(
            param,
            f"This model's maximum context length is {limit} tokens, but {prompt_tokens + max_tokens} were "
            f"requested ({prompt_tokens} in the prompt, {max_tokens} in the completion). "
            "Shorten the prompt or the completion.",
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit


class PromptFarTooLong(InvalidField):
    """A part of the prompt alone does not fit the model's context: the rest is not tokenized."""

    def __init__(self, limit: int, *, param: str = "messages") -> None:
        super().__init__(
            param,
            f"This model's maximum context length is {limit} tokens, but the prompt has more than that "
            "in its first part alone. Shorten the prompt.",
            code="context_length_exceeded",
        )
        self.limit = limit


class PrefixDoesNotFit(ApiError):
    """Too few replicas have room for a prefix to be held."""

    def __init__(self, needed: int, left: int, copies: int, num_held: int) -> None:
        """left: blocks left for pins on the next best replica. num_held: copies that do fit."""
        super().__init__(
            f"The prefix needs {counted(needed, 'block')} on each of {counted(copies, 'replica')}: "
            f"{num_held} can hold it, and the next one has {counted(left, 'block')} left for held prefixes. "
            "Delete some, or ask for less.",
            code="prefix_does_not_fit",
        )
        self.needed = needed
        self.left = left
        self.copies = copies
        self.num_held = num_held


class PrefixLimitReached(ApiError):
    """The key's held prefixes leave too little for one more."""

    def __init__(self, what: str, needed: int, left: int, limit: int) -> None:
        super().__init__(
            f"The prefix needs {needed} {what} of this API key's limit of {limit}, and {left} are left. "
            "Delete some, or ask for less.",
            code="prefix_limit_reached",
        )
        self.needed = needed
        self.left = left
        self.limit = limit


class PrefixCachingOff(ApiError):
    """The engines keep no prefixes."""

    def __init__(self) -> None:
        super().__init__(
            "This server holds no prefixes: its engines run with prefix_caching: false.",
            code="prefix_caching_off",
        )


class PrefixNotFound(ApiError):
    """No prefix of that id is held for this key: which of the two is nobody's business."""

    def __init__(self) -> None:
        super().__init__("No prefix of that id is held.", param="id", code="prefix_not_found")


class NoChatTemplate(ApiError):
    """The model's tokenizer has no chat template, so messages cannot be turned into a prompt."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model {model!r} has no chat template: use /v1/completions, or serve a chat model.",
            param="messages",
            code="no_chat_template",
        )
        self.model = model
