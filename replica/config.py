"""A replica's settings: frozen, checked when built, each default with its reason."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cache.disciplines import DEFAULT, PAGED
from cache.errors import ConfigError, as_yaml
from cache.events import StepTimeModel
from cache.fingerprint import HashAlgorithm
from cache.host_name import HOST_FORM, is_host
from cache.scheduling_order import SchedulingOrder

PREEMPTIONS = ("recompute", "swap")

BLOCK_SIZES: Mapping[str, range] = {
    "gather_sdpa": range(1, 1025),
    "triton": range(1, 1025),
    "flash_attn": range(256, 1025, 256),
}
"""Tokens per KV block that each attention backend serves, by its name. Here and not beside the backends: what
checks a deployment has no torch."""

_WITH_SEVERAL_RANKS: Mapping[str, tuple[Any, ...]] = {
    "runner": ("model",),
    "async_scheduling": (False, "auto"),
    "greedy_screen": ("off", "auto"),
    "host_cache_gib": (0,),
    "device_share": (1,),
}
"""Settings that several processes of one model leave alone, and what they must be then."""


@dataclass(frozen=True, slots=True)
class SimConfig:
    """The simulated runner's model of a machine, and the faults it injects."""

    base_s: float = 0.002  # fixed cost of a step
    per_token_s: float = 0.00002  # 50k tokens/s of prefill
    per_attention_s: float = 1e-9  # per (query, key) pair
    per_sequence_s: float = 0.0001
    slowdown: float = 1.0  # multiplies every step
    hang_after_steps: int | None = None  # stop answering: the watchdog's case
    raise_every_steps: int | None = None  # a forward that fails now and then
    copy_block_s: float = 0.0001  # of a block, to or from host memory
    vocab_size: int = 1000
    num_blocks: int = 4096
    max_model_len: int = 32768

    def __post_init__(self) -> None:
        for name in ("base_s", "per_token_s", "per_attention_s", "per_sequence_s", "copy_block_s"):
            _check_range(f"sim.{name}", getattr(self, name), 0.0, 60.0)
        _check_range("sim.slowdown", self.slowdown, 0.0, 1e6)
        _check_range("sim.vocab_size", self.vocab_size, 1, 1 << 31)
        _check_range("sim.num_blocks", self.num_blocks, 1, 1 << 24)
        _check_range("sim.max_model_len", self.max_model_len, 2, 1 << 31)
        if self.hang_after_steps is not None:
            _check_range("sim.hang_after_steps", self.hang_after_steps, 0, 1 << 31)
        if self.raise_every_steps is not None:
            _check_range("sim.raise_every_steps", self.raise_every_steps, 1, 1 << 31)

    @property
    def step_time(self) -> StepTimeModel:
        """What a step takes, the slowdown included."""
        factor = self.slowdown
        return StepTimeModel(
            self.base_s * factor,
            self.per_token_s * factor,
            self.per_attention_s * factor,
            self.per_sequence_s * factor,
        )


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """Everything one replica needs to start."""

    model: str = "tiny"  # "tiny", a local folder, or a hub id; safetensors only
    revision: str | None = None  # hub commit or branch; None = what the folder or the hub says
    model_name: str | None = None  # what clients call it; None = `model`
    runner: str = "model"  # "model" | "simulated"
    sim: SimConfig = field(default_factory=SimConfig)
    device: str = "auto"  # "cpu" | "cuda" | "auto"
    # Of a CUDA card's memory, what is this replica's where others have their part of it, whoever starts
    # first; deploy takes it from `num_gpus`, where that is less than one.
    device_share: float = 1.0
    # Processes that compute the model together, each a part of every layer: one card each; on CPUs for tests.
    # Needs a family with a plan for it in transformers, and heads that divide.
    tensor_parallel: int = 1
    dtype: str = "auto"  # auto: float32 on CPU, the checkpoint's own on CUDA
    # "triton" reads pages in place on CUDA cards. "flash_attn", where that package is installed, asks for
    # half precision and for blocks of a multiple of 256; it was never run. auto: "triton" on cards in half
    # precision, where it can serve the model, else "gather_sdpa", which runs anywhere.
    attention_backend: str = "auto"
    # On CUDA, with a backend that can ("triton"): decode steps are recorded per batch size and length before
    # the first request, and replayed.
    cuda_graphs: bool = True
    # Decoder layers of the usual kind in fewer, larger operations, where they answer as their own do: on a
    # CPU in float32, on CUDA with "triton", by kernels.
    fused_layers: bool = True
    # The next step is begun while the present one is computed, where nobody has to see its tokens first: a
    # card then does not wait for the schedule. auto: on CUDA; on a CPU nothing would be gained.
    async_scheduling: bool | str = "auto"  # true | false | "auto"
    # Greedy tokens by a coarse product and exact sums of the few it leaves open: the same tokens (CPU,
    # float32). auto: where that is measured to be faster and takes at most a quarter of free memory while it
    # is tried: three quarters of the output layer, and all of it again where the embedding does not share it.
    greedy_screen: str = "auto"  # "auto" | "on" | "off"
    torch_threads: int | None = None  # None = cores divided by replicas on the node, set by deploy
    block_size: int = 16  # tokens; 16 shares finely, 256 opens the flash_attn backend
    num_blocks: int | None = None  # None = from free memory
    kv_memory_fraction: float = 0.5  # of free memory, when num_blocks is None; deploy divides it by replicas
    max_model_len: int | None = None  # None = the model's own limit
    # Token budget of a step: bounds how long a prefill stalls decodes. A prompt whose rest would fit but for
    # the decodes' own tokens ends with the step all the same.
    max_batched_tokens: int = 512
    max_running: int = 64  # sequences in one step
    # Whose prompt is computed first: "first_come"; "shortest", least uncached prefill first, with aging; or
    # "shortest_preempting", where one that has begun stands back for a shorter one, also in the step that the
    # shorter one ends with, and Routers know that.
    scheduling_order: str = SchedulingOrder.SHORTEST_PREEMPTING.value
    # Seconds between two tokens of an answer that prompts beside it may make of it. None: as it is without
    # them, and as much again for each prompt that is to be computed. inf: prompts take whole steps, since
    # Routers price them so.
    itl_target_s: float | None = float("inf")
    max_waiting: int = 256  # beyond this a request is refused as busy, so that memory has a bound
    # Nor is anybody put behind more seconds of prefill: three times what a Router lets wait, since that asks
    # first and knows the fleet. None = no bound.
    max_wait_s: float | None = 30.0
    prefix_caching: bool = True
    # merge_on_fill: a block that fills with what another holds gives way to it: as many hits on less memory,
    # at no measurable cost (docs/design/020). append_only: it is kept, and block tables only grow.
    cache_discipline: str = DEFAULT.value
    # Host memory, GiB, for blocks that the cache evicts: a prompt that finds them there copies them back
    # where that is faster than computing them. Of each replica; on a card it is pinned. 0 = none.
    host_cache_gib: float = 0.0
    # Of a sequence that is put back for want of blocks. recompute: its blocks are left to the cache.
    # swap: they are copied to host memory, as far as `host_cache_gib` has room, and back when it goes on.
    preemption: str = "recompute"
    # Of the blocks, held prefixes may have this share, and never so much that a request of `max_model_len`
    # would not fit beside them. 0 = none may be held.
    max_pinned_fraction: float = 0.5
    kv_events: bool = True  # False: publish load alone; routers then imitate this cache from what they send
    hash_algorithm: HashAlgorithm = HashAlgorithm.XXH3_128
    # After its first token a stream comes in pieces, as large as they can be with no more than this between
    # them: a piece costs as much whatever is in it, and 25 a second read as smoothly as 50. Where two steps
    # take longer than this, every token is a piece. 0 = everywhere.
    stream_interval_s: float = 0.04
    event_host: str = "127.0.0.1"  # where event sockets listen; a node's own address on a cluster
    event_port: int = 0  # base port of PUB, snapshot and delta sockets; 0 = free ones
    # Answers go to a Router over a connection of its own; False: as items of Ray's call, which cost several
    # times as much CPU, on both sides.
    delta_channel: bool = True
    heartbeat_interval_s: float = 0.5  # an idle replica still says it is there
    # A longer step means a dead engine: the watchdog ends the process, within ten seconds with this. Where a
    # full step takes more than a second when the engine starts, eight times that is the limit.
    step_time_limit_s: float = 8.0
    # The same for the warm-up, which compiles; loading is not watched. Of several ranks also how long each
    # waits for the others, while they load too.
    warm_up_time_limit_s: float = 600.0

    def __post_init__(self) -> None:
        _check_one_of("runner", self.runner, ("model", "simulated"))
        _check_one_of("device", self.device, ("auto", "cpu", "cuda"))
        _check_one_of("dtype", self.dtype, ("auto", "float32", "float16", "bfloat16"))
        _check_range("device_share", self.device_share, 0.01, 1.0)
        _check_range("tensor_parallel", self.tensor_parallel, 1, 64)
        if self.tensor_parallel > 1:
            self._check_alone()
        _check_one_of("attention_backend", self.attention_backend, ("auto", *BLOCK_SIZES))
        if self.async_scheduling not in (True, False, "auto"):
            raise ConfigError("async_scheduling", self.async_scheduling, "must be true, false or auto")
        _check_one_of("greedy_screen", self.greedy_screen, ("auto", "on", "off"))
        _check_one_of("cache_discipline", self.cache_discipline, tuple(kind.value for kind in PAGED))
        _check_block_size(self.attention_backend, self.block_size)
        _check_range("kv_memory_fraction", self.kv_memory_fraction, 0.01, 0.95)
        _check_range("max_batched_tokens", self.max_batched_tokens, 1, 1 << 20)
        _check_range("max_running", self.max_running, 1, 4096)
        _check_one_of("scheduling_order", self.scheduling_order, tuple(SchedulingOrder))
        if self.itl_target_s is not None:
            _check_range("itl_target_s", self.itl_target_s, 0.001, float("inf"))
        _check_range("max_waiting", self.max_waiting, 1, 1_000_000)
        if self.max_wait_s is not None:
            _check_range("max_wait_s", self.max_wait_s, 0.001, 86400.0)
        _check_range("host_cache_gib", self.host_cache_gib, 0.0, 65536.0)
        _check_one_of("preemption", self.preemption, PREEMPTIONS)
        if self.preemption == "swap" and not self.host_cache_gib:
            raise ConfigError("preemption", self.preemption, "needs host memory: set host_cache_gib")
        _check_range("max_pinned_fraction", self.max_pinned_fraction, 0.0, 0.95)
        _check_range("stream_interval_s", self.stream_interval_s, 0.0, 10.0)
        _check_range("heartbeat_interval_s", self.heartbeat_interval_s, 0.01, 60.0)
        _check_range("step_time_limit_s", self.step_time_limit_s, 0.1, 3600.0)
        _check_range("warm_up_time_limit_s", self.warm_up_time_limit_s, 1.0, 36000.0)
        if not is_host(self.event_host):
            raise ConfigError("event_host", self.event_host, HOST_FORM)
        if _is_wildcard(self.event_host):
            raise ConfigError(
                "event_host",
                self.event_host,
                "must be an address that Routers can connect to, not a wildcard",
            )
        _check_range("event_port", self.event_port, 0, 65533)
        if self.num_blocks is not None:
            _check_range("num_blocks", self.num_blocks, 1, 1 << 31)
        if self.max_model_len is not None:
            _check_range("max_model_len", self.max_model_len, 2, 1 << 31)
        if self.torch_threads is not None:
            _check_range("torch_threads", self.torch_threads, 1, 1024)

    def _check_alone(self) -> None:
        """What one process does by itself, and several together do not."""
        for name, accepted in _WITH_SEVERAL_RANKS.items():
            value = getattr(self, name)
            if value not in accepted:
                listed = " or ".join(each if isinstance(each, str) else as_yaml(each) for each in accepted)
                raise ConfigError(name, value, f"must be {listed} where tensor_parallel is above 1")


def num_host_blocks(host_cache_gib: float, block_bytes: int) -> int:
    """Whole blocks in so much memory. Raises ConfigError if it is some, and not enough for one."""
    fitting = int(host_cache_gib * (1 << 30)) // block_bytes
    if host_cache_gib and not fitting:
        accepted = f"must hold a block, {block_bytes} bytes, or be 0"
        raise ConfigError("host_cache_gib", host_cache_gib, accepted)
    return fitting


def _check_one_of(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ConfigError(name, value, "must be one of " + ", ".join(accepted))


def _check_block_size(backend: str, block_size: int) -> None:
    served = BLOCK_SIZES if backend == "auto" else {backend: BLOCK_SIZES[backend]}
    if all(block_size not in sizes for sizes in served.values()):
        accepted = [
            f"between {sizes[0]} and {sizes[-1]}"
            + (f" in steps of {sizes.step}" if sizes.step > 1 else "")
            + f" for {name} attention"
            for name, sizes in served.items()
        ]
        raise ConfigError("block_size", block_size, "must be " + ", or ".join(accepted))


def _is_wildcard(host: str) -> bool:
    """Whether sockets would listen at every address: so they read "0" and "00.0.0.0", too."""
    if host in ("", "*"):
        return True
    try:
        (*_, (address, *_rest)), *_ = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except OSError:  # a name, which is looked up where the replica runs
        return False
    return ipaddress.ip_address(str(address).partition("%")[0]).is_unspecified


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(name, value, f"must be between {as_yaml(low)} and {as_yaml(high)}")
