"""The Router's settings: frozen, checked when built, each default with its reason."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cache.errors import HIDDEN, ConfigError
from cache.fingerprint import Fingerprint
from cache.header_text import fits_header
from router.limits import Limits
from router.policies import check_policy
from router.sampling import MAX_TOKENS, MODEL, check_default_sampling
from router.secret_file import check_path, read_secret
from router.tenants.settings import TenantSettings

BINDINGS = ("at_once", "late")
ANY_ORIGIN = "*"

# As browsers send it: in lower case and without a path; the scheme's own port is left out.
_ORIGIN = re.compile(r"(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")

MIN_SECRET_CHARS = 16
MAX_RECORDED_BLOCK = 1024  # tokens: what readers of a trace take

_RANGES: Mapping[str, tuple[float, float]] = {  # of `RouterConfig`: least and most, both accepted
    "hold_backlog_s": (0.0, 60.0),
    "hold_window": (1, 10_000),
    "hold_aging": (0.0, 1000.0),
    "hold_age_floor_s": (0.0, 86400.0),
    "max_held_per_replica": (1, 1_000_000),
    "predicted_ttl_s": (0.0, 3600.0),
    "reservation_ttl_s": (1.0, 86400.0),
    "tokenization_cache_bytes": (0, 1 << 40),
    "silent_after_s": (0.1, 3600.0),
    "max_attempts": (1, 100),
    "max_deaths": (1, 100),
    "debug_requests": (1, 1_000_000),
    "shadow_share": (0.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """Where and how the Router's own traffic is written as a trace: times, lengths, keyed block ids."""

    folder: str  # on the Router's node; made if it is not there
    max_file_bytes: int = 64 << 20  # then a new file begins
    max_total_bytes: int = 1 << 30  # of all traces in the folder: the oldest file goes first
    # Block ids are keyed, so that nobody can look a guessed prompt up. None: drawn at random, never
    # written; the same key in several Routers makes ids that name the same prompt everywhere.
    key: str | None = field(default=None, repr=False)
    key_file: str | None = None  # instead: a file on the Router's node that holds it
    block_tokens: int | None = None  # a multiple of the block size: coarser ids, smaller files; None = that

    def __post_init__(self) -> None:
        check_path("record.folder", self.folder)
        if not 1 << 16 <= self.max_file_bytes <= 1 << 40:
            raise ConfigError(
                "record.max_file_bytes", self.max_file_bytes, "must be between 64 KiB and 1 TiB"
            )
        if not self.max_file_bytes <= self.max_total_bytes <= 1 << 44:
            raise ConfigError(
                "record.max_total_bytes", self.max_total_bytes, "must be between max_file_bytes and 16 TiB"
            )
        check_secret("record.key", self.key)
        if self.key_file is not None:
            if self.key is not None:
                raise ConfigError("record.key_file", self.key_file, "cannot be set beside key")
            check_path("record.key_file", self.key_file)
        if self.block_tokens is not None and not 1 <= self.block_tokens <= MAX_RECORDED_BLOCK:
            raise ConfigError(
                "record.block_tokens", self.block_tokens, f"must be between 1 and {MAX_RECORDED_BLOCK}"
            )

    def read_key(self) -> bytes | None:
        """What block ids are keyed with; None: to be drawn. White space around it in a file is no part of it.

        Raises ConfigError, without showing it, if its file cannot be read or holds too little.
        """
        if self.key_file is not None:
            return read_secret("record.key_file", self.key_file, MIN_SECRET_CHARS)
        return self.key.encode() if self.key is not None else None


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything one Router needs to start. Raises ConfigError, which names field, value and range."""

    model_name: str  # what clients send as `model`
    tokenizer: str  # folder or hub id; loaded without remote code
    fingerprint: Fingerprint  # this Router's own: it matches only replicas that carry the same
    tokenizer_revision: str | None = None
    policy: str = "expected_time"  # one of `router.policies.NAMES`
    policy_options: Mapping[str, object] = field(default_factory=dict)  # its knobs
    # A request waits here until its best replica is nearly free; "at_once": in that replica's own queue.
    binding: str = "late"
    # late: a replica that would start within about this, or in four steps of what it decodes, is free to be
    # given work; within up to twice as much for the shortest requests, for long ones only once it is idle.
    hold_backlog_s: float = 0.05
    hold_window: int = 24  # late: requests, shortest first, that are looked at each time a replica is free
    hold_aging: float = 0.1  # late: seconds of own prefill that one second of waiting outweighs
    # late: who has waited so long goes before everybody who has not. The order lets nobody wait for ever
    # itself, so this is for what no order foresees; who reaches it makes all that follow first come.
    hold_age_floor_s: float = 120.0
    # Who would wait longer for a replica to start on it, or has for its prompt to be tokenized, is refused
    # with 429: after ten seconds without a sign people have turned away. What batches, bursts and many
    # clients at once may wait; None = no bound.
    max_wait_s: float | None = 10.0
    # The same while more keeps coming than is served, when a queue would only make everybody late. Half of
    # the time to the first token that you promise; None = as long as 95 of 100 prompts take to prefill.
    overload_wait_s: float | None = None
    # late: beyond it a request is refused too, so that memory has a bound. A body is let in or refused as
    # one: `limits.max_prompts` may be more than this, and one body's prompts may pass it.
    max_held_per_replica: int = 256
    request_timeout_s: float | None = None  # a request not finished by then is given up; None = never
    predicted_ttl_s: float = 5.0  # a routed prompt counts as cached this long, unless events confirm it
    reservation_ttl_s: float = 600.0  # a reservation nobody released is dropped after this
    # Of the Router's memory, for token ids of texts between special tokens; 0 = tokenize all, every time.
    tokenization_cache_bytes: int = 64 << 20
    silent_after_s: float = 5.0  # a replica without event or heartbeat this long is scored by load alone
    max_attempts: int = 3  # tries per request, each on another replica
    # A request under which so many replicas died, one after the other without a new token between them, is
    # refused, not retried. One that goes on in between has all its attempts.
    max_deaths: int = 2
    limits: Limits = field(default_factory=Limits)  # of one HTTP request
    # Of other sites whose pages may use the API from a browser (CORS). None by default: a service on a
    # laptop would otherwise be open to every page that its owner visits.
    allowed_origins: tuple[str, ...] = ()
    tenants: TenantSettings = field(default_factory=TenantSettings)  # keys, and who shares cached prefixes
    # Thoughts come as `reasoning_content`, where the chat template is of a model that thinks. False: in the
    # content, between their tags, for clients that look for them there.
    separate_reasoning: bool = True
    # What holds for fields of sampling that a request does not name. "model": what its generation_config.json
    # says, which is what its makers tested, and what vLLM does; "openai": that API's defaults, whatever the
    # model; or values by field, and OpenAI's defaults for the others.
    default_sampling: str | Mapping[str, int | float] = MODEL
    model_sampling: Mapping[str, Any] = field(default_factory=dict)  # what the model says
    log_requests: bool = False  # lines per request, with its id and outcome; costs more than routing it
    traces: str | None = None  # an OpenTelemetry exporter by name, "otlp" or "console"; None = no traces
    expose_routing: bool = False  # x-warmpath-* response headers, and the x-warmpath-policy request header
    expose_debug: bool = False  # GET /debug/route: latest decisions by request id, sums; no prompt text
    # What readers of /debug/route and of the dashboard's data must send as a bearer token; None: whoever
    # reaches the port may read them.
    debug_token: str | None = field(default=None, repr=False)
    debug_requests: int = 1024  # kept to be explained, a few KB each
    dashboard: bool = False  # GET /dashboard, a live page: replica names, keyed chain names, no prompt text
    shadow_policy: str | None = None  # decides beside `policy` and is only counted; None = none does
    shadow_policy_options: Mapping[str, object] = field(default_factory=dict)  # its knobs
    shadow_share: float = 1.0  # of the decisions that it takes too: less costs the router less
    record: RecordConfig | None = None  # writes the traffic as a trace; None = nothing is written
    seed: int | None = None  # of the Router's random draws; None = from the system

    def __post_init__(self) -> None:
        check_policy(self.policy, self.policy_options)
        check_default_sampling(self.default_sampling, self.model_sampling)
        self._check_shadow()
        _check_origins("allowed_origins", self.allowed_origins)
        self._check_debug_token()
        self._check_recorded_block()
        if self.binding not in BINDINGS:
            raise ConfigError("binding", self.binding, "must be one of " + ", ".join(BINDINGS))
        for name in ("request_timeout_s", "max_wait_s", "overload_wait_s"):
            limit_s: float | None = getattr(self, name)
            if limit_s is not None and not 0.0 < limit_s <= 86400.0:
                raise ConfigError(name, limit_s, "must be above 0, to 86400.0")
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(name, value, f"must be between {low} and {high}")

    def _check_shadow(self) -> None:
        if self.shadow_policy is not None:
            try:
                check_policy(self.shadow_policy, self.shadow_policy_options)
            except ConfigError as error:
                raise ConfigError(f"shadow_{error.field}", error.value, error.accepted) from None
        elif self.shadow_policy_options:
            raise ConfigError(
                "shadow_policy_options", dict(self.shadow_policy_options), "has no shadow_policy to go with"
            )

    def _check_debug_token(self) -> None:
        check_secret("debug_token", self.debug_token)
        _check_sendable("debug_token", self.debug_token)
        if self.debug_token is not None and self.tenants.has_keys:
            raise ConfigError(
                "debug_token", HIDDEN, "cannot be set beside API keys: operators' keys open /debug/route"
            )

    def _check_recorded_block(self) -> None:
        size = self.fingerprint.block_size
        block_tokens = self.record.block_tokens if self.record is not None else None
        if block_tokens is not None and block_tokens % size:
            raise ConfigError("record.block_tokens", block_tokens, f"must be a multiple of {size}")

    @property
    def sampling_defaults(self) -> Mapping[str, int | float]:
        """Values of a draw's fields that a request does not name; OpenAI's own hold for what is not in it."""
        return {name: value for name, value in self._defaults.items() if name != MAX_TOKENS}

    @property
    def default_max_tokens(self) -> int | None:
        """How long a chat's answer may be that names no limit; None: as long as the context allows."""
        found = self._defaults.get(MAX_TOKENS)
        return None if found is None else int(found)

    @property
    def _defaults(self) -> Mapping[str, int | float]:
        if isinstance(self.default_sampling, str):
            return self.model_sampling if self.default_sampling == MODEL else {}
        return self.default_sampling


def check_secret(name: str, value: str | None) -> None:
    """A secret is long enough not to be guessed. Raises ConfigError without showing it."""
    if value is not None and len(value) < MIN_SECRET_CHARS:
        raise ConfigError(name, HIDDEN, f"must have at least {MIN_SECRET_CHARS} characters")


def _check_origins(name: str, origins: Sequence[str]) -> None:
    """Raises ConfigError for the first that no browser would send."""
    for origin in origins:
        if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
            accepted = (
                'must be "*" or origins as browsers send them, such as https://chat.example or '
                "http://localhost:3000: in lower case, without a path, and without the scheme's own port"
            )
            raise ConfigError(name, origin, accepted)


def _check_sendable(name: str, value: str | None) -> None:
    """What clients send in a header arrives as it was set. Raises ConfigError without showing it."""
    if value is not None and not fits_header(value):
        accepted = (
            "must be of printable ASCII characters, without white space around it: headers hold no other"
        )
        raise ConfigError(name, HIDDEN, accepted)
