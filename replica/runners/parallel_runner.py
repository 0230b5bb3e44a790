"""Computes steps with a model that is cut into parts, one a process: this is rank 0, the others follow it.

Rank 0 has the schedule, draws tokens and answers; each step goes to the followers as a plan just before it is
computed here, and the collectives inside the forward keep them together. What fails on one rank in the middle
of a forward leaves the others waiting, so there is no next step: such a failure ends the engine. Knows ranks
and what they agree on; knows neither the schedule nor Ray.

Linux only: ranks find each other through a file in memory, by a name in /proc.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from cache.errors import ConfigError
from cache.host_tier import BlockMoves
from replica.config import ReplicaConfig
from replica.errors import EngineBroken, InvalidLogits, RankRefused
from replica.models import config_rules, model_probe
from replica.models.model_loader import load_config
from replica.models.model_source import ModelRefused, ResolvedModel
from replica.models.weight_files import fetch_weights
from replica.parallel import orders
from replica.parallel.orders import AllocatePages, Load, Meet, Room
from replica.parallel.rank_group import RankGroup
from replica.runners import load_choices, rank_model, self_check
from replica.runners.followers import Followers
from replica.runners.model_runner import ModelRunner
from replica.runners.start_guard import StartGuard
from replica.scheduling.runner import CopyTime, RunnerInfo, ScheduledSequence, StepResult

_Result = TypeVar("_Result")


class ParallelRunner:
    """`Runner` over `tensor_parallel` processes. One a process, since that has one process group."""

    def __init__(
        self, runner: ModelRunner, followers: Followers, guard: StartGuard, undo: Callable[[], None]
    ) -> None:
        """Use `load`."""
        self._runner = runner
        self._followers = followers
        self._guard = guard
        self._undo = undo
        self._info = replace(runner.info, num_ranks=1 + len(followers.pids), num_layers=1)

    @classmethod
    def load(
        cls,
        config: ReplicaConfig,
        resolved: ResolvedModel,
        *,
        on_lost: Callable[[], None],
        tokenizer_eos: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> ParallelRunner:
        """Load every rank's part, check that together they answer as the whole does, and allocate pages.

        tokenizer_eos: as `ModelRunner.load`.
        on_lost: called on a thread of its own when a follower ends before it is told to, once that is logged;
        before `warm_up` is done, or a step is, only where neither this nor `warm_up` comes back to raise it.
        Raises ConfigError (ModelRefused, NotEnoughMemory) as `ModelRunner.load`, whichever rank refuses, and
        EngineBroken: RankLost, RankSilent, CollectiveFailed.
        """
        loading = _Loading(config, resolved)
        loading.check()
        # Never closed: torch may write to it as late as this process ends, and the number could be another's.
        store_fd = os.memfd_create("warmpath-ranks")
        store = Path(f"/proc/self/fd/{store_fd}")  # on every rank
        guard = StartGuard(on_lost)
        followers = Followers(config.tensor_parallel, shared_fd=store_fd, on_lost=guard.lost)
        limit_s = config.warm_up_time_limit_s
        group: RankGroup | None = None
        runner: ModelRunner | None = None

        def abort() -> None:
            if group is not None:
                group.abort()

        def undo() -> None:
            guard.end()
            followers.tell_end()  # first: over NCCL no rank leaves before the others
            if group is not None:
                group.close()  # whoever waits for this rank in a collective stops waiting
            followers.close()
            if runner is not None:
                runner.close()  # a card gives memory back when it is done, which may need the others' end

        try:
            followers.tell_each(lambda rank: loading.order(rank, store))
            with load_choices.refusals(resolved.source, loading.device):
                model, reference = loading.whole()
                followers.hear_each(limit_s)
                guard.meets(abort)
                followers.tell(Meet())
                group = RankGroup(0, config.tensor_parallel, loading.device, store, limit_s)
                layers = rank_model.cut(model, resolved.source, group, loading.device, loading.max_model_len)
                runner = ModelRunner.with_pages(
                    model,
                    layers,
                    loading.config,
                    resolved.source,
                    max_model_len=loading.max_model_len,
                    tokenizer_eos=tokenizer_eos,
                    agree=lambda num_blocks: _agree(followers, num_blocks, limit_s),
                    announce=lambda sequences: followers.tell(orders.planned(sequences, config.block_size)),
                    clock=clock,
                )
                runner.check_against(reference, resolved.source)
        except Exception as error:
            cause = followers.cause_of(error)
            undo()
            if isinstance(cause, RankRefused):
                raise ModelRefused(resolved.source, str(cause)) from None
            if cause is not error:
                raise cause from None
            raise
        except BaseException:
            undo()
            raise
        return cls(runner, followers, guard, undo)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    @property
    def follower_pids(self) -> list[int]:
        """By rank, from 1 on."""
        return self._followers.pids

    def execute(self, sequences: list[ScheduledSequence]) -> StepResult:
        """Compute one step. Raises InvalidLogits, after which it is usable; EngineBroken, after which not.
        The first is the end of the start where nothing is warmed up."""
        self._guard.serves()
        return self._together(lambda: self._runner.execute(sequences))

    def copy_blocks(self, moves: BlockMoves) -> Sequence[CopyTime]:
        raise AssertionError("a model in several processes has no host memory")

    def warm_up(self) -> float:
        """Raises as `execute`; RankLost, too, where that was not noticed in any of its steps."""
        full_step_s = self._together(self._runner.warm_up)
        self._guard.serves()
        return full_step_s

    def close(self) -> None:
        """End the followers and give memory back. Idempotent."""
        self._undo()

    def _together(self, compute: Callable[[], _Result]) -> _Result:
        if (lost := self._followers.lost()) is not None:
            raise lost
        try:
            return compute()
        except Exception as error:
            cause = self._followers.cause_of(error)
            if cause is not error:
                raise cause from error
            if isinstance(error, (InvalidLogits, EngineBroken)):  # the first is found when every rank is done
                raise
            raise EngineBroken(
                f"a step failed on rank 0 of several, which no longer agree: {error}"
            ) from error


class _Loading:
    """What rank 0 chooses for all before anything is loaded."""

    def __init__(self, config: ReplicaConfig, resolved: ResolvedModel) -> None:
        self._resolved = resolved
        self._model_config = load_config(resolved)
        self.device = load_choices.choose_device(config.device)
        self.dtype = load_choices.choose_dtype(config.dtype, self.device, resolved)
        self.max_model_len = load_choices.choose_length(config, resolved, self._model_config)
        self.config = _of_one_rank(config, self.device)
        self._part_bytes = 0  # until it is checked

    def check(self) -> None:
        """Before gigabytes are fetched and processes started. Raises ConfigError and its kinds."""
        config, resolved, size = self.config, self._resolved, self.config.tensor_parallel
        if sys.platform != "linux":
            accepted = f"must be 1 on {sys.platform}: several ranks need Linux, or a container of it"
            raise ConfigError("tensor_parallel", size, accepted)
        if self.device.type == "cuda" and torch.cuda.device_count() < size:
            accepted = f"needs as many CUDA devices, and torch sees {torch.cuda.device_count()}"
            raise ConfigError("tensor_parallel", size, accepted)
        try:
            config_rules.check_layers(self._model_config)
            config_rules.check_positions(self._model_config, self.max_model_len)
        except model_probe.Unsupported as error:
            raise ModelRefused(resolved.source, f"cannot be served: {error}") from error
        load_choices.check_backend(config, self.device, self.dtype, self._model_config)
        self._part_bytes = rank_model.check(resolved, self._model_config, self.dtype, size)
        fetch_weights(resolved)
        rank_model.check_memory(resolved, self._part_bytes, self.device, self.dtype, size)

    def order(self, rank: int, store: Path) -> Load:
        dtype = str(self.dtype).removeprefix("torch.")
        return Load(self.config, rank, str(store), self.max_model_len, dtype, self._part_bytes)

    def whole(self) -> tuple[Any, torch.Tensor]:
        """The model on the CPU, and what it says by itself: what its parts are held to."""
        if self.config.torch_threads is not None:
            torch.set_num_threads(self.config.torch_threads)
        model = rank_model.load_whole(self._resolved, self.dtype)
        try:
            reference, _ = self_check.reference_of(model, self.max_model_len)
        except model_probe.Unsupported as error:
            raise ModelRefused(self._resolved.source, f"cannot be served: {error}") from error
        return model, reference


def _of_one_rank(config: ReplicaConfig, device: torch.device) -> ReplicaConfig:
    """As each rank reads it: of what a CPU's ranks share, their cores and memory, each has its part."""
    config = replace(config, device=device.type)
    if config.torch_threads is not None:
        config = replace(config, torch_threads=max(1, config.torch_threads // config.tensor_parallel))
    if device.type == "cpu":
        share = max(0.01, config.kv_memory_fraction / config.tensor_parallel)
        config = replace(config, kv_memory_fraction=share)
    return config


def _agree(followers: Followers, num_blocks: int, limit_s: float) -> int:
    """The least that any rank has room for, told to all: one block table serves every rank."""
    answers = followers.hear_each(limit_s)
    least = min(num_blocks, *(answer.num_blocks for answer in answers if isinstance(answer, Room)))
    followers.tell(AllocatePages(least))
    return least
