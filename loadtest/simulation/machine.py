"""The simulated machine: what a step costs, and the limits of its scheduler. Its defaults are derived here.

An 8-billion-parameter decoder (32 layers, width 4096, 8 KV heads of 128: Llama 3.1 8B's shape) in bfloat16
on an H100 SXM card, by its data sheet: 989 TFLOP/s dense, 3.35 TB/s. The terms are those of the engine's fit:

    base_s           6.5 ms: a step reads the weights, 16.1 GB at 80 % of the bandwidth, 6.0 ms; half a
                     millisecond for launching kernels and for the scheduler.
    per_token_s      32 us: 2 x 8.03e9 operations per token at half of the peak; 31 k tokens/s of prefill.
    per_attention_s  1.4 ns per (query, key) pair: 4 x 4096 x 32 = 0.52 M operations, at 380 TFLOP/s.
    per_sequence_s   0.6 ms: a sequence that decodes reads its keys and values, 128 KiB per token, at 80 %
                     of the bandwidth: 0.59 ms for 12 k tokens, the mean context of the conversation trace.
                     The term above prices arithmetic, not bandwidth, and would see a fortieth of it.

The sum is a little more than a real step, which overlaps reading and arithmetic. Cache sizes come from
elsewhere: 80 GB less the weights hold 0.4 M tokens; 1.5 M and 6 M are an 8-bit cache on a larger card, and
host memory. Knows numbers; knows neither requests nor replicas.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

from cache.events import StepTimeModel
from cache.scheduling_order import SchedulingOrder

# What `describe` says in words.
_TOLD = frozenset(
    {
        *("base_s", "per_token_s", "per_attention_s", "per_sequence_s"),
        *("max_batched_tokens", "max_running", "num_engines"),
    }
)


@dataclass(frozen=True, slots=True)
class Machine:
    """One replica's hardware, model and scheduler limits."""

    base_s: float = 0.0065
    per_token_s: float = 32e-6
    per_attention_s: float = 1.4e-9
    per_sequence_s: float = 0.6e-3
    max_batched_tokens: int = 8192  # vLLM's default for servers on such a card
    max_running: int = 256  # memory ends it sooner: 0.4 M tokens are 33 such prompts
    max_model_len: int = 1 << 18  # above the longest request of the traces (128 k)
    scheduling_order: SchedulingOrder = SchedulingOrder.FIRST_COME
    # As `ReplicaConfig` has it, but for the default: comparisons of placement are made without it.
    itl_target_s: float | None = math.inf

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, (int, float)) and not value >= 0:
                raise ValueError(f"machine.{name} = {value} is negative")
        for name in ("max_batched_tokens", "max_running", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"machine.{name} = {getattr(self, name)} is less than 1")
        if not (self.base_s or self.per_token_s):
            raise ValueError(
                "machine.base_s and machine.per_token_s are both 0: its steps would take no time"
            )

    def step_time(self, slowdown: float = 1.0) -> StepTimeModel:
        """The step-time model of one replica, every term `slowdown` times the machine's."""
        alone = StepTimeModel(self.base_s, self.per_token_s, self.per_attention_s, self.per_sequence_s)
        return slowed(alone, slowdown)

    def engines_at_once(self, num_replicas: int) -> float:
        """Of so many, those that compute at full speed at one time."""
        return num_replicas

    def describe(self) -> str:
        """One line for the head of a report: the usual constants, and of the others those that are not the
        default, so that machines that differ are told apart."""
        rest = ", ".join(
            f"{field.name} = {_shown(getattr(self, field.name))}"
            for field in fields(self)
            if field.name not in _TOLD and getattr(self, field.name) != getattr(H100_8B, field.name, None)
        )
        return (
            f"step = {_shown(1e3 * self.base_s)} ms + {_shown(1e6 * self.per_token_s)} us/token"
            f" + {_shown(1e9 * self.per_attention_s)} ns/(query, key)"
            f" + {_shown(1e3 * self.per_sequence_s)} ms/sequence;"
            f" at most {self.max_batched_tokens} tokens and {self.max_running} sequences a step"
            + (f"; {rest}" if rest else "")
        )


@dataclass(frozen=True, slots=True)
class MachineWithHost(Machine):
    """A machine that keeps evicted blocks in host memory. A class of its own, so that the results of cells
    without it keep their names."""

    host_blocks: int = 65_536
    copy_block_s: float = 0.1e-3  # 2 MiB, 16 tokens of the model above, at 20 GB/s: a card's own bus, shared


@dataclass(frozen=True, slots=True)
class SharedMachine(Machine):
    """One machine that all replicas compute on, as several do on one host's cores: those that compute at one
    time slow each other. A class of its own for the same reason."""

    num_engines: float = 1.0  # that it computes at full speed

    def __post_init__(self) -> None:
        super(SharedMachine, self).__post_init__()  # the class that slots made is another than `super()` has
        if self.num_engines < 1:
            raise ValueError(f"machine.num_engines = {self.num_engines} is less than 1")

    def engines_at_once(self, num_replicas: int) -> float:
        """As many as it has room for."""
        return min(num_replicas, self.num_engines)

    def describe(self) -> str:
        """The same, and who shares it."""
        alone = super(SharedMachine, self).describe()
        return f"{alone}; all replicas on one machine that computes {_shown(self.num_engines)} at full speed"


def slowed(model: StepTimeModel, times: float) -> StepTimeModel:
    """Every term so many times the model's."""
    return StepTimeModel(
        base_s=model.base_s * times,
        per_token_s=model.per_token_s * times,
        per_attention_s=model.per_attention_s * times,
        per_sequence_s=model.per_sequence_s * times,
    )


def _shown(value: object) -> str:
    """A number as short as it was given: 1e3 * 0.0041 is not quite 4.1."""
    return f"{value:.12g}" if isinstance(value, float) else str(value)


H100_8B = Machine()
