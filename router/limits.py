"""How much one HTTP request may ask for: every bound in one place, each with its reason.

What follows from the model (context length, vocabulary) is no setting and is not here. Knows numbers; knows
neither HTTP nor fields. `docs/configuration.md` shows them; a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from cache.deep_threads import MAX_SOURCE_BYTES
from cache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """`limits:` under the Router's settings."""

    max_header_bytes: int = 16 << 10  # names and values together; proxies in front mostly allow less
    max_body_bytes: int = 4 << 20  # of a request; a million tokens of text fit
    # Of all bodies at a time that are not yet placed, a Router's memory: only those above 64 KiB are refused
    # for it, and one of the largest size has room where nobody else sends any.
    max_bodies_bytes: int = 256 << 20
    # Without a byte of one that is under way: a network may lose its way for so long. Whoever only stops in
    # the middle would keep room that is everybody's.
    max_body_pause_seconds: int = 10
    # In which a client takes nothing of a stream that is there for it: whoever only stays would keep its
    # place. 4 MB fit between it and us, and 1.4 of them are read before more is taken: this is 1.6 KB/s.
    max_unread_seconds: int = 900
    max_json_depth: int = 64  # nested arrays and objects; tool schemas need about ten
    max_messages: int = 4096  # of a chat, and calls in all of them: templates write each
    max_prompts: int = 64  # of a completions body: each is a request of its own to a replica
    max_answers: int = 128  # `n`, and prompts times `n`: each is a sequence of its own; the API's own bound
    max_stop_strings: int = 16  # and as many `stop_token_ids`: each is looked for after every token
    max_stop_chars: int = 256  # of one stop string: that much text may have to be held back
    max_salt_chars: int = 1024  # of `cache_salt` and `prompt_cache_key`: a digest fits many times
    max_logit_bias: int = 1024  # token ids in it: each is looked up in every step
    max_logprobs: int = 20  # most probable tokens told beside each; the API's own bound, and the engine's
    max_tools: int = 128  # the API's own bound
    max_template_bytes: int = 16 << 10  # of `chat_template_kwargs`, as JSON: switches, a date, a few texts
    max_structure_bytes: int = 64 << 10  # of a schema, regular expression or grammar; large ones have ten
    max_schema_depth: int = 16  # schemas in schemas, functions' too; a text of that shape is unreadable
    max_compile_seconds: int = 5  # for a structure; real ones take milliseconds
    max_pending_structures: int = 64  # to be tried, of all requests: mostly a millisecond each
    max_timeout_seconds: int = 86_400  # that a client may say it waits; nobody waits for a day
    max_prefix_copies: int = 10_000  # of one held prefix: more than any fleet has replicas
    max_prefix_seconds: int = 86_400  # a held prefix takes room from everybody: whoever wants it asks again
    max_prefixes: int = 16  # held for one API key, where its own limits say nothing else
    max_prefix_tokens: int = 1 << 18  # of all of those, each copy counted

    def __post_init__(self) -> None:
        for field in fields(self):
            low, high = _RANGES.get(field.name, (1, 1_000_000))
            value = getattr(self, field.name)
            if not low <= value <= high:
                raise ConfigError(f"limits.{field.name}", value, f"must be between {low} and {high}")


_RANGES = {
    "max_header_bytes": (1024, 1 << 20),
    "max_body_bytes": (1024, 1 << 30),
    "max_bodies_bytes": (1 << 16, 1 << 40),
    "max_body_pause_seconds": (1, 3600),
    "max_unread_seconds": (1, 86_400),
    "max_json_depth": (4, 128),  # the parser's own end is at 200
    "max_structure_bytes": (256, MAX_SOURCE_BYTES),  # the stacks that they are compiled on hold no more
    "max_compile_seconds": (1, 60),
    "max_logprobs": (0, 20),  # engines refuse more
    "max_pending_structures": (1, 4096),  # each holds its source, and two threads work them off
    "max_timeout_seconds": (1, 30 * 86_400),
    "max_prefix_seconds": (1, 30 * 86_400),
    "max_prefix_tokens": (1, 1 << 40),
}
