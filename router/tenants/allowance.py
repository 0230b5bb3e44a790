"""What one key may still take at this Router, and one request's share of it.

A key's limits are of all Routers together: each enforces an equal part, since proxies spread requests evenly
over them; what does not divide falls to the first of them. Rates are counted in buckets of one minute. A
request is let in (`enter`) before its body is read, takes its prompts' tokens (`charge`) before a replica
hears of it, and its answer's tokens (`spend`) as they come, or as an engine says that it has computed them:
those may take the key's tokens below zero, and the next request waits until that is made up.
Knows numbers; knows neither HTTP nor keys' digests. Owner: the router's event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from cache.counted import counted
from cache.priority import MIN_PRIORITY
from router.errors import InvalidField, RateLimitExceeded
from router.tenants.key_table import ApiKey, KeyLimits
from router.tenants.token_bucket import TokenBucket

_CONCURRENCY_RETRY_S = 1.0  # when an answer ends cannot be known


class Limit(StrEnum):
    """The three limits, as errors and metrics name them."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"


class Allowance:
    """One key's limits at this Router."""

    __slots__ = (
        "_clock",
        "_limits",
        "_num_routers",
        "_rank",
        "_refused",
        "_requests",
        "_tokens",
        "max_running",
        "running",
    )

    def __init__(self, clock: Callable[[], float], refused: Callable[[Limit], None]) -> None:
        """Without limits until `fit`. refused: told of every request that a limit stopped."""
        self._clock = clock
        self._refused = refused
        self._limits = KeyLimits()
        self._rank, self._num_routers = 0, 1
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self.max_running: int | None = None  # prompts, this Router's part
        self.running = 0

    def fit(self, limits: KeyLimits, rank: int, num_routers: int) -> None:
        """Enforce this Router's part of `limits` from now on; what was used up stays used up.

        rank: this Router's place among them, from 0.
        """
        if limits is self._limits and (rank, num_routers) == (self._rank, self._num_routers):
            return
        now = self._clock()
        self._requests = _fitted(self._requests, limits.requests_per_minute, num_routers, now)
        self._tokens = _fitted(self._tokens, limits.tokens_per_minute, num_routers, now)
        # At least one each, or a key with fewer than Routers could not be used at some of them.
        most = limits.max_concurrent
        self.max_running = None if most is None else max(1, most // num_routers + (rank < most % num_routers))
        self._limits, self._rank, self._num_routers = limits, rank, num_routers

    def enter(self) -> None:
        """Take one request, and room for one prompt. Raises RateLimitExceeded, and has then taken nothing."""
        now = self._clock()
        self._check_running(1)
        if self._tokens is not None and self._tokens.level(now) <= 0.0:
            raise self._over(Limit.TOKENS, self._tokens.wait_s(1.0, now))
        if self._requests is not None:
            if (wait_s := self._requests.wait_s(1.0, now)) > 0.0:
                raise self._over(Limit.REQUESTS, wait_s)
            self._requests.take(1.0, now)
        self.running += 1

    def charge(self, more_prompts: int, num_tokens: int) -> None:
        """Room for so many prompts more, and tokens. Raises as `enter` does, or InvalidField."""
        self._check_batch(1 + more_prompts)
        self._check_running(more_prompts)
        if self._tokens is not None:
            now = self._clock()
            if (wait_s := self._tokens.wait_s(num_tokens, now)) > 0.0:
                raise self._over(Limit.TOKENS, wait_s)
            self._tokens.take(num_tokens, now)
        self.running += more_prompts

    def spend(self, num_tokens: int) -> None:
        """Tokens that were made, whether they were left or not; a negative number gives back."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, self._clock())

    def headers(self) -> dict[str, str]:
        """What is left, in the headers that OpenAI's clients read: numbers for all Routers together."""
        now, headers = self._clock(), {}
        for name, bucket, limit in (
            ("requests", self._requests, self._limits.requests_per_minute),
            ("tokens", self._tokens, self._limits.tokens_per_minute),
        ):
            if bucket is not None and limit is not None:
                left = max(0, int(bucket.level(now))) * self._num_routers
                headers[f"x-ratelimit-limit-{name}"] = str(limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(min(limit, left))
                headers[f"x-ratelimit-reset-{name}"] = duration(bucket.full_in_s(now))
        return headers

    def _check_batch(self, num_prompts: int) -> None:
        """A batch for which there is never room is no matter of trying again. Each Router has room for the
        least part: what one refuses so, all do."""
        limit = self._limits.max_concurrent
        if limit is not None and num_prompts > (most := max(1, limit // self._num_routers)):
            shared = f" ({limit}, shared by {self._num_routers} Routers)"
            raise InvalidField(
                "prompt",
                f"'prompt' must have at most {counted(most, 'prompt')} with this API key, which may have so "
                f"many answered at a time{shared if self._num_routers > 1 else ''}; this one has "
                f"{num_prompts}.",
            )

    def _check_running(self, more: int) -> None:
        if self.max_running is not None and self.running + more > self.max_running and more:
            raise self._over(Limit.CONCURRENCY, _CONCURRENCY_RETRY_S)

    def _over(self, limit: Limit, wait_s: float) -> RateLimitExceeded:
        self._refused(limit)
        limits = self._limits
        text = {
            Limit.REQUESTS: f"{counted(limits.requests_per_minute or 0, 'request')} per minute",
            Limit.TOKENS: f"{limits.tokens_per_minute} tokens per minute",
            Limit.CONCURRENCY: f"{counted(limits.max_concurrent or 0, 'prompt')} at a time",
        }[limit]
        return RateLimitExceeded(text, wait_s)


def _fitted(
    bucket: TokenBucket | None, per_minute: int | None, num_routers: int, now: float
) -> TokenBucket | None:
    if per_minute is None:
        return None
    share = per_minute / num_routers
    if bucket is None:
        return TokenBucket(share, now)
    bucket.resize(share, now)
    return bucket


def duration(seconds: float) -> str:
    """As the API writes durations: "120ms", "7s", "6m0s". Rounded up: whoever waits so long is not early."""
    if seconds < 1.0:
        return f"{-int(-seconds * 1000 // 1)}ms"
    whole = -int(-seconds // 1)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if whole >= 60 else "") + f"{rest}s"


class Visit:
    """One request of one key, from its header to the end of its answer. `close` gives its room back."""

    __slots__ = ("_allowance", "_charged", "_running", "key")

    def __init__(self, key: ApiKey, allowance: Allowance | None = None) -> None:
        """allowance: entered already, for one prompt. None: nothing is limited."""
        self.key = key
        self._allowance = allowance
        self._running = 0 if allowance is None else 1
        self._charged = 0

    @property
    def tenant(self) -> str:
        """Whose cache it uses; "" where nobody is asked for a key."""
        return self.key.tenant

    def priority(self, asked: int | None) -> int:
        """The request's, among its tenant's; asked: None = nothing was. Raises InvalidField.

        A key that may only stand back does so unasked.
        """
        least = self.key.priority
        if asked is None:
            return max(0, least)
        if asked < least:
            raise InvalidField("priority", f"'priority' must be at least {least} with this API key.")
        return asked

    def charge(self, num_prompts: int, num_tokens: int) -> None:
        """What it is about to have computed. Call once. Raises RateLimitExceeded or InvalidField."""
        if self._allowance is not None:
            self._allowance.charge(num_prompts - 1, num_tokens)
            self._running += num_prompts - 1
            self._charged = num_tokens

    def spend(self, num_tokens: int) -> None:
        """Tokens of its answer."""
        if self._allowance is not None:
            self._allowance.spend(num_tokens)

    def refund(self) -> None:
        """It failed through no doing of its sender's: give back what `charge` took."""
        if self._allowance is not None and self._charged:
            self._allowance.spend(-self._charged)
            self._charged = 0

    def headers(self) -> dict[str, str]:
        """What is left to its key; {} without limits."""
        return {} if self._allowance is None else self._allowance.headers()

    def close(self) -> None:
        """Idempotent."""
        if self._allowance is not None:
            self._allowance.running -= self._running
            self._running = 0


ANYBODY = ApiKey(name="", tenant="", is_operator=True, priority=MIN_PRIORITY)
OPEN_VISIT = Visit(ANYBODY)
"""Any request to a Router without keys."""
