"""What crosses the border between router and replica, besides KV events (`events.py`).

`GenerateRequest` goes out as a handle call's argument, `Delta`s come back as its stream.
`ReplicaInfo` travels in the replica's metadata. Plain values: no behaviour, no Ray. A field that is
added has a default, which stands for what the version before did: `pickled.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from cache.fingerprint import Fingerprint, HashAlgorithm, SaltMode
from cache.pickled import across_versions
from cache.scheduling_order import SchedulingOrder
from cache.structure import Structure
from cache.types import BlockHash, PinId, ReplicaId, RequestId


class FinishReason(StrEnum):
    """Why a generation ended; the values are the OpenAI API's."""

    STOP = "stop"  # end-of-sequence token, stop string or stop id
    LENGTH = "length"  # max_tokens or the model's length limit


@across_versions
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens and when to stop. Already validated where it was built (the router's edge)."""

    max_tokens: int
    min_tokens: int = 0  # end-of-sequence and stops are ignored before this many
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0 = all
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0  # in [0, 1]: keep tokens at least this share as probable as the most probable one
    presence_penalty: float = 0.0  # off the logit of each token of the output, once
    frequency_penalty: float = 0.0  # the same, as often as the token is there
    repetition_penalty: float = 1.0  # divides positive logits of prompt and output tokens, multiplies others
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit); each id once
    logprobs: int | None = None  # of the tokens drawn, and so many most probable ones; None = of none
    prompt_logprobs: int | None = None  # of the prompt's tokens; until they are sent, it is computed whole
    skip_special_tokens: bool = True  # False: the text spells them, for whoever reads a format that they make

    @property
    def is_penalised(self) -> bool:
        """Whether the logits depend on which tokens there are already."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@across_versions
@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of consecutive tokens, packed: float32 natural logarithms, never positive.

    They are the model's own: of the logits before bias, penalties, temperature and filters. At each place
    also the `num_top` most probable tokens, most probable first; the token itself need not be among them.
    """

    num_top: int
    chosen: array[float]  # (tokens,)
    top_ids: array[int]  # (tokens * num_top,), a token's next to each other
    top: array[float]  # the same shape

    def __len__(self) -> int:
        return len(self.chosen)

    @classmethod
    def joined(cls, parts: Sequence[Logprobs]) -> Logprobs | None:
        """These one after another, of one `num_top`; None of nothing."""
        if len(parts) < 2:
            return parts[0] if parts else None
        chosen, top_ids, top = array("f"), array("i"), array("f")
        for part in parts:
            chosen += part.chosen
            top_ids += part.top_ids
            top += part.top
        return cls(parts[0].num_top, chosen, top_ids, top)


@across_versions
@dataclass(frozen=True, slots=True)
class PinLease:
    """What makes a request one that holds its prompt's full blocks instead of generating from it.

    It ends as soon as they are computed, with a delta that has no tokens; they are held from then on. All
    but `seconds` is for whoever asks what is held, and carried along.
    """

    pin_id: PinId  # the same on every replica that holds a copy
    owner: str  # names whose it is, and nothing else of them
    seconds: float  # held so long, by the replica's clock
    copies: int  # replicas that are to hold it
    created_at: float  # unix seconds, on the clock of the Router that was asked
    expires_at: float  # the same
    keeper: str  # the Router that makes lost copies again
    cache_salt: str  # the request's, for whoever is to make it again


@across_versions
@dataclass(frozen=True, slots=True)
class ReleasePin:
    """One replica is to give back what a pin holds there. The answer: whether it held it."""

    pin_id: PinId
    replica_id: ReplicaId


@across_versions
@dataclass(frozen=True, slots=True)
class InheritPin:
    """Another Router is to keep what a pin holds at one replica. The answer: `HeldPrefix`; None where it is
    not held, or where somebody else was quicker: then nothing changes."""

    pin_id: PinId
    replica_id: ReplicaId
    keeper: str  # who has kept it, as the heir knows it
    heir: str  # who asks


@across_versions
@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """What a pin holds: enough to compute it elsewhere."""

    token_ids: array[int]  # packed int32; a whole number of blocks
    cache_salt: str


@across_versions
@dataclass(frozen=True, slots=True)
class AnswerSoFar:
    """What earlier attempts generated of one of several answers."""

    token_ids: array[int]  # its output, packed int32
    sent_chars: int
    is_over: bool  # the client has all of it


@across_versions
@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One attempt at one generation, as the router sends it to a replica.

    `token_ids[:num_prompt_tokens]` is the prompt; what follows was generated by an earlier attempt
    that died, so a replica can continue its stream: it re-detokenizes from the first output
    token and emits text from character `sent_chars` on.
    """

    request_id: RequestId
    token_ids: array[int]  # packed int32: prompt, then tokens of earlier attempts
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int  # the draw at (seed, position) is a pure function; drawn by the ingress if not given
    sent_chars: int = 0  # characters of output text the client already has
    cache_salt: str = ""
    adapter: str = ""
    tenant: str = ""
    share: float = 1.0  # its tenant's part of the engine, beside other tenants'; above 0
    priority: int = 0  # among its tenant's: `cache/priority.py`
    waited_s: float = 0.0  # since it came to its Router, when sent: its place in a queue counts them
    attempt: int = 0
    excluded_replicas: frozenset[ReplicaId] = frozenset()
    ranks: tuple[ReplicaId, ...] = ()  # best first: where `Routing.choose` wants it
    block_hashes: Sequence[BlockHash] = ()  # of the prompt's full blocks; () = not sent, hash yourself
    deadline_s: float | None = None  # seconds left when sent; clocks differ between nodes
    traceparent: str = ""  # W3C trace context of the call that sends it; "" = nobody traces
    pin: PinLease | None = None  # None: generate; else hold the prompt's full blocks, and generate nothing
    structure: Structure | None = None  # what the output has to be; never part of a block's hash
    # Answers wanted. With several, `token_ids` is the prompt alone, `sent_chars` is 0, and what earlier
    # attempts generated is in `answers`: one for each, or () if none of them has begun.
    n: int = 1
    answers: tuple[AnswerSoFar, ...] = ()
    # Seconds of each replica's time that wait at Routers, as of now. Of no use to this generation: a replica
    # passes it on to whoever decides how many replicas there are, and has nobody else to hear it from.
    held_s: float = 0.0
    # Likewise: the work that its Router refused lately, for each second of it that was placed.
    refused_ratio: float = 0.0
    for_cache: bool = False  # nobody waits for it: compute the prompt's blocks, and generate nothing

    @property
    def num_answers_left(self) -> int:
        """Answers that are still wanted: so many deltas of its stream carry a finish_reason."""
        return self.n - sum(answer.is_over for answer in self.answers)


@across_versions
@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one generation's stream. `token_ids` may run ahead of `text` (held-back stop
    strings, half characters); the last one carries `finish_reason`."""

    text: str
    token_ids: tuple[int, ...]
    cached_tokens: int  # prompt tokens taken from the cache at first admission: the engine's count
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None  # one per token of `token_ids`, where they were asked for
    # Of the prompt's tokens but the first, where asked for: with the first delta of the whole generation.
    prompt_logprobs: Logprobs | None = None
    choice: int = 0  # which of several answers it continues


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What a replica tells once, when it becomes ready. JSON-able through `to_json`."""

    fingerprint: Fingerprint
    event_endpoint: str  # ZMQ PUB: KV events and load
    snapshot_endpoint: str  # ZMQ ROUTER: answers snapshot requests
    num_blocks: int
    max_model_len: int  # prompt + output tokens
    max_batched_tokens: int  # token budget of one step
    device: str
    attention_backend: str
    pid: int = field(default=0)
    max_running: int = 64  # sequences in one step
    max_waiting: int = 256  # beyond this the engine refuses: the router does not send it more
    has_prefix_cache: bool = True  # False: it keeps nothing, so there is nothing to match or to predict
    has_kv_events: bool = True  # False: its events carry load alone, and routers imitate its cache
    delta_endpoint: str = ""  # TCP: deltas of calls that ask for them there; "" = all come by the call
    has_logits: bool = True  # False: its model is simulated, and nothing about logits can be asked of it
    num_ranks: int = 1  # processes that compute the model together; `device` is the first one's
    machine: str = ""  # equal for those that share their cores or their card; "" = shared with nobody
    machine_engines: float = 1.0  # such as this one that the machine computes at once, none slowing another
    scheduling_order: SchedulingOrder = SchedulingOrder.FIRST_COME  # whose prompt is computed next
    num_host_blocks: int = 0  # that it can keep in host memory, beside `num_blocks` in its pool
    vocab_size: int | None = None  # ids its model has, from 0; None = not told: another version

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ReplicaInfo:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError on another shape."""
        mark = dict(value["fingerprint"])
        mark["hash_algorithm"] = HashAlgorithm(mark["hash_algorithm"])
        mark["salt_mode"] = SaltMode(mark["salt_mode"])
        order = SchedulingOrder(value.get("scheduling_order", SchedulingOrder.FIRST_COME))
        return cls(**{**value, "fingerprint": Fingerprint(**mark), "scheduling_order": order})
