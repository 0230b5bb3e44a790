"""The border between the scheduler and whatever computes a step: `ModelRunner` or `SimRunner`.

Torch-free, so that the scheduler, the engine and the simulated runner import without it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from cache.host_tier import BlockMoves
from cache.messages import Logprobs, SamplingParams
from cache.types import RequestId
from replica.output.logprob_log import LogprobLog
from replica.scheduling.layer_span import LayerSpan
from replica.structures.matcher import StructureMatcher


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a runner is, known once it has loaded."""

    device: str  # "cpu", "cuda:0", "simulated"
    attention_backend: str  # "gather_sdpa", ...
    kv_dtype: str  # "float32", ...
    num_blocks: int
    block_size: int
    kv_bytes_per_block: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    num_host_blocks: int = 0  # that it can copy to host memory; 0 = none
    has_logits: bool = True  # False: its tokens come from nowhere; what is about logits cannot be honoured
    num_ranks: int = 1  # processes that compute a step together; `device` is the first one's
    num_layers: int = 1  # that a prompt's part may go through in several steps; 1 = all of them in one


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: compute tokens [start, start + num_new_tokens)."""

    request_id: RequestId
    token_ids: array[int]  # prompt + output so far; read-only here
    # Covers at least start + num_new_tokens slots; read-only here, and good for this step: the next one's may
    # name another block for the same tokens.
    block_table: list[int]
    start: int  # tokens whose K/V are already in the pages
    num_new_tokens: int
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    # Block to copy into the one that `start` lies in, before anything is computed; None = nothing is copied.
    copy_source: int | None = None
    logprobs: LogprobLog | None = None  # where the engine puts what was asked for of them; None = nothing
    structure: StructureMatcher | None = None  # says what its next token may be
    # Which sequence of the step before draws its last token, which is then its only new one and not among
    # `token_ids` yet (`LaunchingRunner`). None = every token is there.
    drawn_by: int | None = None
    # Through which layers its new tokens go in this step; None = all. Else it is the last sequence of a step
    # of decodes, and its other layers follow, span by span: in steps with the same tokens, until `is_last`.
    layers: LayerSpan | None = None

    @property
    def num_tokens(self) -> int:
        """Its tokens when the step begins: the position of the one it draws, if it draws one."""
        return len(self.token_ids) + (self.drawn_by is not None)

    @property
    def samples(self) -> bool:
        """Whether this step reaches the sequence's last token and so draws the next one.

        The draw's position is `num_tokens`: same seed and position, same draw, whatever the
        batch, the chunks, a preemption, or the replica.
        """
        if self.layers is not None and not self.layers.is_last:
            return False
        return self.start + self.num_new_tokens == self.num_tokens


@dataclass(frozen=True, slots=True)
class CopyTime:
    """How long some copies between the pages and host memory took."""

    is_load: bool  # from host memory
    num_blocks: int
    elapsed_s: float


_NOBODY: Mapping[int, Logprobs] = MappingProxyType({})


def _nobody() -> Mapping[int, Logprobs]:
    """A factory, because Python 3.11 takes a mapping proxy, which it cannot hash, for a mutable default."""
    return _NOBODY


@dataclass(frozen=True, slots=True)
class StepResult:
    """`next_tokens[i]` belongs to sequence i of the step; None where it did not sample."""

    next_tokens: tuple[int | None, ...]
    elapsed_s: float  # the forward's duration, for the step-time fit
    # By sequence of the step, where its sampling parameters ask for them.
    logprobs: Mapping[int, Logprobs] = field(default_factory=_nobody)  # of its next token
    # Of the prompt tokens at [start + 1, start + 1 + len): a chunk's rows tell of the tokens that follow.
    prompt_logprobs: Mapping[int, Logprobs] = field(default_factory=_nobody)


class Runner(Protocol):
    """Computes steps. Called from the engine thread only; `execute` blocks until the step is done.

    `execute` may raise anything: the engine then fails the step's requests and un-registers what
    the step had registered; the runner must stay usable. After InvalidLogits those that it names fail,
    and the others' step is taken back. After StepOutOfMemory nobody fails: the engine takes the step
    back and makes smaller ones.
    """

    @property
    def info(self) -> RunnerInfo: ...
    def execute(self, sequences: list[ScheduledSequence]) -> StepResult: ...
    def copy_blocks(self, moves: BlockMoves) -> Sequence[CopyTime]:
        """Make these copies before anything of the coming step is computed: saves, then loads.

        Returns how long copies took, as far as that has become known. If it raises, nobody knows what host
        memory holds; after StepOutOfMemory the step is made smaller, else it fails.
        """

    def warm_up(self) -> float:
        """Run prefill and decode on scratch blocks before any request arrives.

        Returns the seconds of a full prefill step, without what only a first one takes; 0 if nobody waits.
        """

    def close(self) -> None: ...


class LaunchedStep(Protocol):
    """A step that is being computed."""

    def result(self) -> StepResult:
        """Wait until it is done, and for nothing that was launched after it. Call it once.

        Raises what `Runner.execute` raises. `elapsed_s` is the device's own: what it spent on the step before
        is not counted.
        """


@runtime_checkable
class LaunchingRunner(Runner, Protocol):
    """Takes a step while it still computes the one before; both then wait for nothing but each other.

    Steps and `copy_blocks` are computed in the order in which they are given.
    """

    def launch(
        self, sequences: Sequence[ScheduledSequence], before: LaunchedStep | None = None
    ) -> LaunchedStep:
        """Begin a step; `execute` is this and its result. May block where the device does not queue.

        before: the step launched right before it, whose sequences `drawn_by` counts; its result need not have
        been taken. Where that one failed, this one does. Raises nothing: the result does.
        """
