"""Computes steps with a real model: transformers' own code, our attention over our pages.

All sequences of a step are packed into one (1, tokens) forward. Knows devices, dtypes and memory;
knows neither the schedule nor the cache's bookkeeping: block tables come in with each sequence.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from cache.host_tier import BlockMoves
from replica.attention import kv_pages
from replica.attention.backend import AttentionBackend, HoldingBackend, choose_backend
from replica.attention.gather_sdpa import GatherSdpa
from replica.attention.host_pages import HostPages
from replica.attention.kv_pages import KVPages, LayerShape
from replica.attention.step_batch import StepBatch
from replica.config import ReplicaConfig
from replica.device_errors import is_out_of_memory
from replica.errors import EngineBroken, StepOutOfMemory
from replica.layers.decoder_block import DecoderBlock
from replica.layers.fused_norm import fuse_norms
from replica.layers.layered_part import LayeredPart
from replica.layers.packed_linear import pack_linears
from replica.layers.screened_head import ScreenedHead
from replica.models import config_rules, model_probe
from replica.models.model_loader import load_config, load_model
from replica.models.model_source import ModelRefused, ResolvedModel
from replica.models.weight_files import fetch_weights
from replica.output.sampler import Drawing
from replica.runners import load_choices, self_check
from replica.runners.decode_graphs import CudaRecorder, DecodeGraphs, Recorder
from replica.runners.drawer import Drawer
from replica.runners.lost_card import is_lost
from replica.runners.prompt_scoring import PromptScorer, wanted
from replica.runners.queued_step import FailedStep, ModelStep, QueuedStep, drawn_tokens
from replica.scheduling.runner import CopyTime, LaunchedStep, RunnerInfo, ScheduledSequence, StepResult

Announce = Callable[[Sequence[ScheduledSequence]], None]
"""Told of each step before its forward, which whoever computes the model's other parts has to begin, too."""

_Result = TypeVar("_Result")


class ModelRunner:
    """`Runner` over a transformers model. `execute` may be called from any one thread at a time."""

    def __init__(
        self,
        model: Any,
        pages: KVPages,
        info: RunnerInfo,
        *,
        host_pages: HostPages | None = None,
        torch_threads: int | None,
        max_batched_tokens: int,
        announce: Announce | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Use `load`. model: in eval mode, its attention modules bound to `pages`."""
        self._announce = announce
        self._model = model
        self._pages = pages
        self._host_pages = host_pages
        self._info = info
        self._torch_threads = torch_threads
        self._max_batched_tokens = max_batched_tokens
        self._clock = clock
        self._done_s = -float("inf")  # when the last result was there
        self._thread_id: int | None = None  # the thread whose torch thread count was set
        self._device = torch.device(info.device)
        self._dtype: torch.dtype = model.dtype
        self._takes_rows = bool(model._supports_logits_to_keep())
        head = model.get_output_embeddings()
        self._drawer = Drawer(
            head if isinstance(head, ScreenedHead) else None, info.eos_token_ids, self._device
        )
        self._graphs: DecodeGraphs | None = None
        self._layered_part: LayeredPart | None = None

    @classmethod
    def load(
        cls,
        config: ReplicaConfig,
        resolved: ResolvedModel,
        *,
        tokenizer_eos: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> ModelRunner:
        """Load the model, check that it can be served exactly, and allocate its pages. Shows progress.

        tokenizer_eos: the id that its tokenizer ends a text with, which ends an answer as the model's own do.
        Raises ConfigError (ModelRefused, NotEnoughMemory): unsupported family, memory short, device absent.
        """
        if config.torch_threads is not None:
            torch.set_num_threads(config.torch_threads)
        device = load_choices.choose_device(config.device)
        model_config = load_config(resolved)
        dtype = load_choices.choose_dtype(config.dtype, device, resolved)
        try:
            config_rules.check_layers(model_config)
            max_model_len = load_choices.choose_length(config, resolved, model_config)
            config_rules.check_positions(model_config, max_model_len)
        except model_probe.Unsupported as error:
            raise ModelRefused(resolved.source, f"cannot be served: {error}") from error
        # Before gigabytes are fetched and loaded.
        load_choices.check_backend(config, device, dtype, model_config)
        fetch_weights(resolved)
        load_choices.check_memory_for_weights(config, resolved, device, dtype)
        with load_choices.refusals(resolved.source, device):
            model = load_model(resolved, device, dtype)
        return cls.over(
            model,
            config,
            resolved.source,
            max_model_len=max_model_len,
            tokenizer_eos=tokenizer_eos,
            clock=clock,
        )

    @classmethod
    def over(
        cls,
        model: Any,
        config: ReplicaConfig,
        source: str,
        *,
        max_model_len: int,
        tokenizer_eos: int | None = None,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> ModelRunner:
        """Over a model that is on its device, in eval mode: check it and allocate its pages. Changes it.

        source: what it is called where it is refused. recorder: what records decode steps; None = CUDA graphs
        on CUDA, nothing elsewhere. Raises as `load`.
        """
        device = model.device
        with load_choices.refusals(source, device):
            reference, head_rows = self_check.reference_of(model, max_model_len)
            layers = model_probe.probe_layers(model)
            model_probe.check_windows(model.config, layers, max_model_len)
            config = load_choices.settle_backend(config, model, [shape for _, shape in layers])
            fuse_norms(model)
            head = load_choices.head_to_screen(config, model) if head_rows.numel() else None
            load_choices.fuse_layers(
                config, model, lambda: model_probe.probe_layers(model, self_check.spread(max_model_len))
            )
            pack_linears(model, run=lambda: model_probe.probe_layers(model))
            layers = model_probe.probe_layers(model)  # as they are now
            if head is not None:
                block_bytes = kv_pages.bytes_per_block(
                    [shape for _, shape in layers], config.block_size, model.dtype
                )
                load_choices.screen_if_faster(config, source, model, head, head_rows, block_bytes)
                del head  # and with it the weight as loaded, if nobody else holds it
            if recorder is None and device.type == "cuda" and config.cuda_graphs:
                recorder = CudaRecorder(device)
            runner = cls.with_pages(
                model,
                layers,
                config,
                source,
                max_model_len=max_model_len,
                tokenizer_eos=tokenizer_eos,
                recorder=recorder,
                clock=clock,
            )
            runner.check_against(reference, source)
            return runner

    @classmethod
    def with_pages(
        cls,
        model: Any,
        layers: Sequence[tuple[nn.Module, LayerShape]],
        config: ReplicaConfig,
        source: str,
        *,
        max_model_len: int,
        tokenizer_eos: int | None = None,
        recorder: Recorder | None = None,
        agree: Callable[[int], int] = lambda num_blocks: num_blocks,
        announce: Announce | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> ModelRunner:
        """Pages for a model whose attention modules are `layers`, and a runner over both: not checked yet.

        agree: from the blocks that fit here to those there will be. recorder: as `over`, None = nothing.
        """
        device, dtype = model.device, model.dtype
        shapes = [shape for _, shape in layers]
        backend = choose_backend(config.attention_backend, device, dtype, shapes, config.block_size)
        block_bytes = kv_pages.bytes_per_block(shapes, config.block_size, dtype)
        # After everything else that is kept for as long as the model.
        num_blocks = agree(load_choices.choose_num_blocks(config, source, model, shapes, max_model_len))
        pages = KVPages(
            [module for module, _ in layers],
            shapes,
            # One more is for recorded steps' padding, and in nobody's table.
            num_blocks=num_blocks + (recorder is not None),
            block_size=config.block_size,
            dtype=dtype,
            device=device,
            backend=backend,
        )
        num_host_blocks = load_choices.choose_num_host_blocks(config, source, block_bytes)
        info = RunnerInfo(
            device=str(device),
            attention_backend=backend.name,
            kv_dtype=str(dtype).removeprefix("torch."),
            num_blocks=num_blocks,
            block_size=config.block_size,
            kv_bytes_per_block=block_bytes,
            num_host_blocks=num_host_blocks,
            vocab_size=int(model.config.get_text_config().vocab_size),
            max_model_len=max_model_len,
            eos_token_ids=load_choices.eos_token_ids(model, tokenizer_eos),
            num_layers=len(layers) if _takes_parts_by_layers(backend, layers) else 1,
        )
        runner = cls(
            model,
            pages,
            info,
            host_pages=HostPages(pages, num_host_blocks, clock=clock) if num_host_blocks else None,
            torch_threads=config.torch_threads,
            max_batched_tokens=config.max_batched_tokens,
            announce=announce,
            clock=clock,
        )
        if info.num_layers > 1:
            runner._layered_part = LayeredPart([module for module, _ in layers])
        if recorder is not None and isinstance(backend, HoldingBackend):
            runner._graphs = DecodeGraphs(
                runner._forward,
                backend,
                recorder,
                block_size=config.block_size,
                spare_block=num_blocks,
                max_batch=config.max_running,
                max_length=max_model_len,
                device=device,
                dtype=dtype,
            )
        return runner

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def execute(self, sequences: list[ScheduledSequence]) -> StepResult:
        """Compute one step. Raises StepOutOfMemory, InvalidLogits, or whatever the model raises; usable again
        after any of them, and not after EngineBroken."""
        return self.launch(sequences).result()

    def launch(
        self, sequences: Sequence[ScheduledSequence], before: LaunchedStep | None = None
    ) -> LaunchedStep:
        """Queue a step. On a CPU it is done then, as is whatever asks the card for an answer on its way."""
        began_s = self._clock()
        num_tokens = sum([sequence.num_new_tokens for sequence in sequences])
        if isinstance(before, FailedStep):
            return before
        assert before is None or isinstance(before, ModelStep)
        earlier = None if before is None else before.queued
        try:
            queued = self._within_memory(num_tokens, lambda: self._queue(sequences, earlier))
        except Exception as error:
            return FailedStep(error)
        return ModelStep(
            queued,
            lambda queued: self._within_memory(num_tokens, lambda: self._finish(queued, began_s)),
        )

    def copy_blocks(self, moves: BlockMoves) -> Sequence[CopyTime]:
        host_pages = self._host_pages
        assert host_pages is not None, "this runner has no host memory"
        num_tokens = (len(moves.saves) + len(moves.loads)) * self._info.block_size
        return self._within_memory(num_tokens, lambda: host_pages.copy(moves))

    def _within_memory(self, num_tokens: int, compute: Callable[[], _Result]) -> _Result:
        """Raises StepOutOfMemory where memory ran out, whichever allocator said so; EngineBroken where the
        card computes nothing any more."""
        try:
            return compute()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                if is_lost(self._device):
                    raise EngineBroken(f"{self._device} is lost to this process: {error}") from error
                raise
            cause = type(error).__name__
        # Here, since the error's traceback held the step's tensors until now.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise StepOutOfMemory(num_tokens, cause)

    def _queue(self, sequences: Sequence[ScheduledSequence], before: QueuedStep | None) -> QueuedStep:
        self._set_torch_threads()
        if self._announce is not None:
            self._announce(sequences)
        with torch.inference_mode():
            self._pages.copy_blocks(_copies(sequences, self._info.block_size))
            replayed = self._replay(sequences, before)
            if replayed is not None:
                return QueuedStep(range(len(sequences)), replayed)
            batch = StepBatch(sequences, self._info.block_size, self._device, self._dtype)
            ordered = [sequences[i] for i in batch.order]
            if (drawn := drawn_tokens(ordered, before)) is not None:
                batch.put_tokens(*drawn)  # decodes, which come first and have a row each
            if not (chunks := wanted(sequences, batch.order)):
                with self._sent_through_layers(sequences[-1], batch):
                    drawing = self._drawer.compute(ordered, lambda: self._forward(batch))
                    return QueuedStep(batch.order, drawing)
            scorer = PromptScorer(self._model, takes_rows=self._takes_rows)
            with scorer.keeping():
                drawing = self._drawer.compute(ordered, lambda: self._forward(batch))
            return QueuedStep(batch.order, drawing, scorer.score(batch, chunks))

    def follow(self, sequences: Sequence[ScheduledSequence]) -> None:
        """Compute a step's forwards as `execute` does, and draw nothing: for a rank that only has its part.

        Raises whatever the model raises; then this rank is out of step with the others for good.
        """
        self._set_torch_threads()
        with torch.inference_mode():
            self._pages.copy_blocks(_copies(sequences, self._info.block_size))
            batch = StepBatch(sequences, self._info.block_size, self._device, self._dtype)
            chunks = wanted(sequences, batch.order)
            scorer = PromptScorer(self._model, takes_rows=self._takes_rows)
            with scorer.keeping() if chunks else nullcontext():
                self._forward(batch)
            if chunks:
                scorer.score(batch, chunks)

    def _finish(self, queued: QueuedStep, began_s: float) -> StepResult:
        # The device began with it when it was done with the step before, if that was later.
        began_s = max(began_s, self._done_s)
        try:
            with torch.inference_mode():
                result = queued.result()
        finally:  # it was busy until now with a step whose answers are nonsense, too
            self._done_s = self._clock()
        return replace(result, elapsed_s=self._done_s - began_s)

    def check_against(self, reference: torch.Tensor, source: str) -> None:
        """Refuse, and close, a model that answers otherwise through our attention than through its own."""
        self._set_torch_threads()
        try:
            with torch.inference_mode():
                self_check.compare(reference, self._info, self._dtype, self._answer)
        except self_check.Differs as error:
            self.close()
            raise ModelRefused(source, f"cannot be served: {error}") from error

    def warm_up(self) -> float:
        """Full prefill steps and a decode on scratch blocks, recordings; no request may hold blocks yet."""
        room = min(self._info.num_blocks * self._info.block_size, self._info.max_model_len) - 1
        length = max(1, min(self._max_batched_tokens, room))
        for start, stop in ((0, length), (length, length + 1)):
            self.execute([self_check.scratch_sequence(start, stop, self._info)])
        if self._graphs is not None:
            with torch.inference_mode():
                self._graphs.record_ahead()
        while True:
            try:
                return self.execute([self_check.scratch_sequence(0, length, self._info)]).elapsed_s
            except StepOutOfMemory:
                # What was recorded took the memory of a step that fitted before it.
                if self._graphs is None or not self._graphs.give_back():
                    raise

    def close(self) -> None:
        """Give the pages and the model's memory back. Idempotent; the runner is of no use afterwards."""
        if self._graphs is not None:
            self._graphs.close()
        if self._host_pages is not None:
            self._host_pages.close()
            self._host_pages = None
        self._pages.detach()
        self._model = None
        self._layered_part = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # -- a step -----------------------------------------------------------------------------------

    def _sent_through_layers(self, last: ScheduledSequence, batch: StepBatch) -> AbstractContextManager[None]:
        """Meanwhile the step's forwards send its last sequence through no other layers than it asks for."""
        if last.layers is None:
            return nullcontext()
        assert self._layered_part is not None, "this runner's layers are not called one by one"
        return self._layered_part.sent(last, batch.num_decodes)

    def _replay(self, sequences: Sequence[ScheduledSequence], before: QueuedStep | None) -> Drawing | None:
        """The step from a recording, in the order given; None where there is none of its shape."""
        graphs = self._graphs
        if graphs is None or not graphs.suits(sequences) or wanted(sequences, range(len(sequences))):
            return None
        logits = graphs.logits(sequences, drawn_tokens(sequences, before))
        return None if logits is None else self._drawer.begin(sequences, logits)

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

    def _answer(self, sequence: ScheduledSequence) -> torch.Tensor:
        """Logits of its last row, (vocabulary,), in a step of its own."""
        if self._announce is not None:
            self._announce([sequence])
        return self._forward(StepBatch([sequence], self._info.block_size, self._device, self._dtype))[0]

    def _set_torch_threads(self) -> None:
        # The count belongs to the thread that set it (OpenMP): the engine's is not the one that loaded.
        thread_id = threading.get_ident()
        if self._torch_threads is not None and thread_id != self._thread_id:
            torch.set_num_threads(self._torch_threads)
            self._thread_id = thread_id


def _takes_parts_by_layers(backend: AttentionBackend, layers: Sequence[tuple[nn.Module, LayerShape]]) -> bool:
    """Whether all layers, and the attention, can be given the decodes of a step without its prompt."""
    return isinstance(backend, GatherSdpa) and all(isinstance(module, DecoderBlock) for module, _ in layers)


def _copies(sequences: Sequence[ScheduledSequence], block_size: int) -> list[tuple[int, int]]:
    """(from, to) of the blocks that forked sequences begin with."""
    return [
        (item.copy_source, item.block_table[item.start // block_size])
        for item in sequences
        if item.copy_source is not None
    ]
