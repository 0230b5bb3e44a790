"""Computes steps with a real model: transformers' own code, our attention over our pages.

All sequences of a step are packed into one (1, tokens) forward. Knows devices, dtypes and memory;
knows neither the schedule nor the cache's bookkeeping: block tables come in with each sequence.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from array import array
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from cache.errors import ConfigError
from cache.messages import Logprobs, SamplingParams
from cache.types import RequestId
from replica.attention import kv_pages
from replica.attention.backend import choose_backend
from replica.attention.kv_pages import KVPages, LayerShape
from replica.attention.step_batch import StepBatch
from replica.config import ReplicaConfig
from replica.errors import StepOutOfMemory
from replica.layers.decoder_block import fuse_blocks
from replica.layers.fused_norm import fuse_norms
from replica.layers.packed_linear import PackedLinear, pack_linears
from replica.layers.screened_head import RowsAsked, ScreenedHead, keeps_order, screen_bytes, screen_head
from replica.models import model_probe
from replica.models.model_source import (
    ModelRefused,
    NotEnoughMemory,
    ResolvedModel,
    fetch_weights,
    load_config,
    load_model,
    weight_bytes,
)
from replica.output.sampler import Drawn, DrawRow, Sampler, takes_largest
from replica.runners.prompt_scoring import PromptScorer, wanted
from replica.scheduling.runner import RunnerInfo, ScheduledSequence, StepResult
from replica.structures.matcher import StructureMatcher

logger = logging.getLogger(__name__)

# The self-check's prompt: long enough for several blocks of 16 and a chunk with context.
CHECK_TOKENS = 40
# Largest relative difference between the model's own logits and ours. A wrong mask or position changes
# them by half or more; rounding stays far below even in half precision.
CHECK_TOLERANCE = {torch.float32: 1e-3}
CHECK_TOLERANCE_HALF = 0.2

# What is put in a decoder layer's place is compared with it at so many positions.
CHECK_POSITIONS = 10

# Of free memory, for what only makes greedy tokens faster, unless it is asked for by name.
SCREEN_MEMORY_SHARE = 0.25


class ModelRunner:
    """`Runner` over a transformers model. `execute` may be called from any one thread at a time."""

    def __init__(
        self,
        model: Any,
        pages: KVPages,
        info: RunnerInfo,
        *,
        torch_threads: int | None,
        max_batched_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Use `load`. model: in eval mode, its attention modules bound to `pages`."""
        self._model = model
        self._pages = pages
        self._info = info
        self._torch_threads = torch_threads
        self._max_batched_tokens = max_batched_tokens
        self._clock = clock
        self._thread_id: int | None = None  # the thread whose torch thread count was set
        self._device = torch.device(info.device)
        self._dtype: torch.dtype = model.dtype
        self._takes_rows = bool(model._supports_logits_to_keep())
        head = model.get_output_embeddings()
        self._head = head if isinstance(head, ScreenedHead) else None
        self._sampler = Sampler(info.eos_token_ids)

    @classmethod
    def load(
        cls, config: ReplicaConfig, resolved: ResolvedModel, *, clock: Callable[[], float] = time.perf_counter
    ) -> ModelRunner:
        """Load the model, check that it can be served exactly, and allocate its pages. Shows progress.

        Raises ConfigError (ModelRefused, NotEnoughMemory): unsupported family, memory short, device absent.
        """
        if config.torch_threads is not None:
            torch.set_num_threads(config.torch_threads)
        device = _choose_device(config.device)
        model_config = load_config(resolved)
        dtype = _choose_dtype(config.dtype, device, model_config)
        try:
            model_probe.check_layers(model_config)
            max_model_len = _choose_length(config, resolved, model_config)
            model_probe.check_positions(model_config, max_model_len)
            fetch_weights(resolved)
            _check_memory_for_weights(resolved, device, dtype)
            model = load_model(resolved, device, dtype)
            reference, head_rows = _reference(model, max_model_len)
            model_probe.probe_layers(model)
            fuse_norms(model)
            head = _head_to_screen(config, model) if head_rows.numel() else None
            fuse_blocks(model, run=lambda: model_probe.probe_layers(model, _spread(max_model_len)))
            pack_linears(model, run=lambda: model_probe.probe_layers(model))
            layers = model_probe.probe_layers(model)  # as they are now
        except model_probe.Unsupported as error:
            raise ModelRefused(resolved.source, f"cannot be served: {error}") from error
        shapes = [shape for _, shape in layers]
        if head is not None:
            block_bytes = kv_pages.bytes_per_block(shapes, config.block_size, dtype)
            _screen_head(config, resolved, model, head, head_rows, block_bytes)
            del head  # and with it the weight as loaded, if nobody else holds it
        # After everything else that is kept for as long as the model.
        num_blocks = _choose_num_blocks(config, resolved, shapes, device, dtype, max_model_len)
        backend = choose_backend(config.attention_backend, device)
        pages = KVPages(
            [module for module, _ in layers],
            shapes,
            num_blocks=num_blocks,
            block_size=config.block_size,
            dtype=dtype,
            device=device,
            backend=backend,
        )
        info = RunnerInfo(
            device=str(device),
            attention_backend=backend.name,
            kv_dtype=str(dtype).removeprefix("torch."),
            num_blocks=num_blocks,
            block_size=config.block_size,
            kv_bytes_per_block=kv_pages.bytes_per_block(shapes, config.block_size, dtype),
            vocab_size=int(model_config.get_text_config().vocab_size),
            max_model_len=max_model_len,
            eos_token_ids=_eos_token_ids(model),
        )
        runner = cls(
            model,
            pages,
            info,
            torch_threads=config.torch_threads,
            max_batched_tokens=config.max_batched_tokens,
            clock=clock,
        )
        runner._check_against(reference, resolved)
        return runner

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def execute(self, sequences: list[ScheduledSequence]) -> StepResult:
        """Compute one step. Raises StepOutOfMemory, InvalidLogits, or whatever the model raises; usable again
        after any of them."""
        try:
            return self._execute(sequences)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            cause = type(error).__name__
        # Here, since the error's traceback held the step's tensors until now.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise StepOutOfMemory(sum(sequence.num_new_tokens for sequence in sequences), cause)

    def _execute(self, sequences: list[ScheduledSequence]) -> StepResult:
        started_s = self._clock()
        self._set_torch_threads()
        with torch.inference_mode():
            batch = StepBatch(sequences, self._info.block_size, self._device, self._dtype)
            self._pages.copy_blocks(_copies(sequences, self._info.block_size))
            ordered = [sequences[i] for i in batch.order]
            rows, structures = [_draw_row(sequence) for sequence in ordered], _structures(ordered)
            prompt_logprobs: dict[int, Logprobs] = {}
            if chunks := wanted(sequences, batch.order):
                scorer = PromptScorer(self._model, takes_rows=self._takes_rows)
                with scorer.keeping():
                    drawn = self._draw(batch, rows, structures)
                prompt_logprobs = scorer.score(batch, chunks)
            else:
                drawn = self._draw(batch, rows, structures)
        next_tokens: list[int | None] = [None] * len(sequences)
        for index, token_id in zip(batch.order, drawn.tokens, strict=True):
            next_tokens[index] = token_id
        logprobs = {batch.order[row]: found for row, found in drawn.logprobs.items()}
        return StepResult(tuple(next_tokens), self._clock() - started_s, logprobs, prompt_logprobs)

    def warm_up(self) -> float:
        """Full prefill steps and a decode on scratch blocks; no request may hold blocks yet."""
        room = min(self._info.num_blocks * self._info.block_size, self._info.max_model_len) - 1
        length = max(1, min(self._max_batched_tokens, room))
        for start, stop in ((0, length), (length, length + 1)):
            self.execute([self._scratch_sequence(start, stop)])
        return self.execute([self._scratch_sequence(0, length)]).elapsed_s

    def close(self) -> None:
        """Give the pages and the model's memory back. Idempotent; the runner is of no use afterwards."""
        self._pages.detach()
        self._model = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # -- a step -----------------------------------------------------------------------------------

    def _draw(
        self, batch: StepBatch, rows: list[DrawRow | None], structures: Mapping[int, StructureMatcher]
    ) -> Drawn:
        """Run the forward and draw from it, in the order of the batch. structures: by row."""
        if self._head is not None:
            asked = _rows_asked(rows, self._info.eos_token_ids, structures)
            answered = None
            if self._head.screens(asked, len(rows)):
                answered = self._head.answer(asked, lambda: self._forward(batch))
            if answered is not None:
                masks = _masks(
                    {p: structures[row] for p, row in enumerate(answered.computed) if row in structures}
                )
                in_full = self._sampler.sample(
                    answered.logits, [rows[row] for row in answered.computed], masks=masks
                )
                tokens = answered.tokens | dict(zip(answered.computed, in_full.tokens, strict=True))
                logprobs = {answered.computed[place]: found for place, found in in_full.logprobs.items()}
                return Drawn([tokens.get(row) for row in range(len(rows))], logprobs)
        logits = self._forward(batch)
        # Now: on a GPU the forward has only been queued, and is computed meanwhile.
        return self._sampler.sample(logits, rows, masks=_masks(structures))

    def _forward(self, batch: StepBatch) -> torch.Tensor:
        """Logits of each sequence's last row, (sequences, vocabulary), in the order of the batch.

        May be run again for the same batch: its keys and values are then written once more.
        """
        self._pages.batch = batch
        try:
            options = {"logits_to_keep": batch.last_rows} if self._takes_rows else {}
            logits = model_probe.run(self._model, batch.input_ids, batch.positions, **options)[0]
        finally:
            self._pages.batch = None
        return logits if self._takes_rows else logits[batch.last_rows]

    def _set_torch_threads(self) -> None:
        # The count belongs to the thread that set it (OpenMP): the engine's is not the one that loaded.
        thread_id = threading.get_ident()
        if self._torch_threads is not None and thread_id != self._thread_id:
            torch.set_num_threads(self._torch_threads)
            self._thread_id = thread_id

    def _scratch_sequence(self, start: int, stop: int) -> ScheduledSequence:
        """Tokens [start, stop) of a made-up sequence in blocks 0, 1, 2, ..."""
        return ScheduledSequence(
            request_id=RequestId("warm-up"),
            token_ids=array("i", _check_tokens(stop, self._info.vocab_size)),
            block_table=list(range(-(-stop // self._info.block_size))),
            start=start,
            num_new_tokens=stop - start,
            num_prompt_tokens=stop,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            seed=0,
        )

    # -- the self-check ---------------------------------------------------------------------------

    def _check_against(self, reference: torch.Tensor, resolved: ResolvedModel) -> None:
        """Refuse a model that answers otherwise through our attention than through its own."""
        length = min(reference.shape[0], self._info.num_blocks * self._info.block_size)
        cuts = sorted({0, length // 2, max(0, length - 1), length})  # a chunk, a chunk with context, a decode
        rows = []
        self._set_torch_threads()
        with torch.inference_mode():
            for start, stop in itertools.pairwise(cuts):
                sequence = self._scratch_sequence(start, stop)
                batch = StepBatch([sequence], self._info.block_size, self._device, self._dtype)
                logits = self._forward(batch)
                rows.append((stop - 1, logits[0].float()))
        tolerance = CHECK_TOLERANCE.get(self._dtype, CHECK_TOLERANCE_HALF)
        for row, ours in rows:
            own = reference[row]
            difference = float((ours - own).norm() / own.norm().clamp(min=1e-12))
            if not difference <= tolerance:  # NaN is refused too
                self.close()
                raise ModelRefused(
                    resolved.source,
                    f"cannot be served: paged attention changes its logits by {difference:.2g} (relative) "
                    f"at position {row}; more than {tolerance} is not rounding",
                )


def _is_out_of_memory(error: Exception) -> bool:
    """torch has a type for devices' allocators; on the CPU it is a RuntimeError like any other."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "DefaultCPUAllocator: " in str(error)


def _reference(model: Any, max_model_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model itself says about the self-check's prompt, (tokens, vocabulary) float32, and the rows
    that its output layer says it of, (tokens, width); none of a model that does not name that layer."""
    length = min(CHECK_TOKENS, max_model_len)
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.tensor([_check_tokens(length, vocabulary)])
    rows = [torch.empty(1, 0, 0)]
    head = model.get_output_embeddings()
    hooks = [] if head is None else [head.register_forward_pre_hook(lambda _, given: rows.append(given[0]))]
    try:
        # Eager is the definition: other implementations leave out what they cannot do (transformers 5.17's
        # SDPA ignores gemma2's softcap).
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            return model_probe.run(model, tokens, torch.arange(length)[None])[0].float(), rows[-1].flatten(
                0, -2
            )
    except Exception as error:
        raise model_probe.Unsupported(f"its own forward fails: {type(error).__name__}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()


def _check_tokens(length: int, vocabulary: int) -> list[int]:
    """Different ids in no particular order, the same every time."""
    return [(7919 * index + 13) % vocabulary for index in range(length)]


def _spread(max_model_len: int) -> list[int]:
    """A few positions, the first ones and the last among them."""
    spaced = (index * (max_model_len - 1) // (CHECK_POSITIONS - 2) for index in range(CHECK_POSITIONS - 1))
    return sorted({0, min(1, max_model_len - 1), *spaced})


def _draw_row(sequence: ScheduledSequence) -> DrawRow | None:
    if not sequence.samples:
        return None
    position = len(sequence.token_ids)
    num_output_tokens = position - sequence.num_prompt_tokens
    return DrawRow(sequence.sampling, sequence.seed, position, num_output_tokens, sequence.token_ids)


def _rows_asked(
    rows: list[DrawRow | None], eos_token_ids: frozenset[int], structures: Container[int]
) -> RowsAsked:
    largest: list[int] = []
    others: list[int] = []
    for index, row in enumerate(rows):
        if row is not None:
            is_largest = index not in structures and takes_largest(row, eos_token_ids)
            (largest if is_largest else others).append(index)
    return RowsAsked(tuple(largest), tuple(others))


def _copies(sequences: Sequence[ScheduledSequence], block_size: int) -> list[tuple[int, int]]:
    """(from, to) of the blocks that forked sequences begin with."""
    return [
        (item.copy_source, item.block_table[item.start // block_size])
        for item in sequences
        if item.copy_source is not None
    ]


def _structures(sequences: Sequence[ScheduledSequence]) -> dict[int, StructureMatcher]:
    """By row, of those that draw a token."""
    return {
        row: sequence.structure
        for row, sequence in enumerate(sequences)
        if sequence.structure is not None and sequence.samples
    }


def _masks(structures: Mapping[int, StructureMatcher]) -> dict[int, torch.Tensor]:
    """What may come next, by row: bits, the lowest first."""
    masks = {}
    for row, structure in structures.items():
        words = np.zeros(structure.num_words, dtype=np.int32)
        structure.fill(words)
        masks[row] = torch.from_numpy(words)
    return masks


# -- choices made at load ---------------------------------------------------------------------------


def _choose_device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device", name, "torch sees no CUDA device; use cpu or auto")
    return torch.device("cuda", torch.cuda.current_device())


def _choose_dtype(name: str, device: torch.device, model_config: Any) -> torch.dtype:
    if name != "auto":
        return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]
    if device.type == "cpu":
        return torch.float32
    stored = getattr(model_config, "dtype", None)
    return stored if stored in (torch.float16, torch.bfloat16) else torch.float32


def _choose_length(config: ReplicaConfig, resolved: ResolvedModel, model_config: Any) -> int:
    """The longest sequence served, tokens. Raises ConfigError when more is asked than the model knows."""
    limit = model_probe.length_limit(model_config) or resolved.max_model_len
    if config.max_model_len is None:
        if limit is None:
            raise ConfigError("max_model_len", None, f"{resolved.source} does not say its limit: set one")
        return limit
    if limit is not None and config.max_model_len > limit:
        raise ConfigError("max_model_len", config.max_model_len, f"{resolved.source} knows {limit} positions")
    return config.max_model_len


def _check_memory_for_weights(resolved: ResolvedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Before loading: the weights must fit. What is left for pages is checked when their shape is known."""
    needed = weight_bytes(resolved, str(dtype).removeprefix("torch."))
    free = kv_pages.free_bytes(device)
    if needed > free:
        raise NotEnoughMemory(resolved.source, needed, free, str(device), "its weights")


def _head_to_screen(config: ReplicaConfig, model: Any) -> nn.Linear | None:
    """The model's output layer as loaded, if its greedy tokens could be screened; packing replaces it."""
    head = model.get_output_embeddings()
    can_be = (
        config.greedy_screen != "off"
        and type(head) is nn.Linear
        and head.weight.dtype == torch.float32
        and head.weight.device.type == "cpu"
        and model._supports_logits_to_keep()
        and keeps_order(head.out_features, lambda logits: model_probe.replay_logits(model, logits))
    )
    return head if can_be else None


def _screen_head(
    config: ReplicaConfig,
    resolved: ResolvedModel,
    model: Any,
    linear: nn.Linear,
    rows: torch.Tensor,
    block_bytes: int,
) -> None:
    """Let the model's output layer screen greedy tokens, where that is asked for or faster.

    rows: (rows, width), such as it is given. Raises NotEnoughMemory when it is asked for and does not fit.
    """
    packed = model.get_output_embeddings()
    if not isinstance(packed, PackedLinear):
        return
    is_shared = any(parameter is linear.weight for parameter in model.parameters())
    needed, free = screen_bytes(linear, is_shared=is_shared), kv_pages.free_bytes(linear.weight.device)
    if config.greedy_screen == "on" and needed > free:
        raise NotEnoughMemory(resolved.source, needed, free, "cpu", "greedy_screen: on")
    to_spare = SCREEN_MEMORY_SHARE * (free - (config.num_blocks or 0) * block_bytes)
    if config.greedy_screen == "auto" and needed > to_spare:
        logger.info("greedy tokens are not screened", extra={"reason": "memory", "needed_bytes": needed})
        return
    measured = config.greedy_screen == "auto"
    screened = screen_head(linear, packed, rows, is_shared=is_shared, measured=measured)
    if screened is not None:
        model.set_output_embeddings(screened)
        logger.info("greedy tokens are screened", extra={"bytes": needed})


def _choose_num_blocks(
    config: ReplicaConfig,
    resolved: ResolvedModel,
    shapes: list[LayerShape],
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
) -> int:
    """Blocks asked for, or as many as the allowed share of free memory holds. Raises NotEnoughMemory."""
    block_bytes = kv_pages.bytes_per_block(shapes, config.block_size, dtype)
    free = kv_pages.free_bytes(device)
    if config.num_blocks is not None:
        needed = config.num_blocks * block_bytes
        if needed > free:
            purpose = f"{config.num_blocks} KV blocks"
            raise NotEnoughMemory(resolved.source, needed, free, str(device), purpose)
        return config.num_blocks
    fewest = -(-min(config.max_batched_tokens, max_model_len) // config.block_size)  # one full step
    num_blocks = kv_pages.blocks_from_memory(free, config.kv_memory_fraction, block_bytes, device)
    if num_blocks < fewest:
        share = int(free * config.kv_memory_fraction)
        purpose = f"the KV blocks of a single step (kv_memory_fraction is {config.kv_memory_fraction})"
        raise NotEnoughMemory(resolved.source, fewest * block_bytes, share, str(device), purpose)
    return num_blocks


def _eos_token_ids(model: Any) -> frozenset[int]:
    """Ids that end a generation: the generation config's where there is one, else the config's."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return frozenset([value] if isinstance(value, int) else value)
    return frozenset()
