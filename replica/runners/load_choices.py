"""What is chosen when a model is loaded: device, dtype, length, layers, a screen for greedy tokens, blocks.

Knows the configuration, the model and memory; knows no steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cache.errors import ConfigError
from replica.attention import kv_pages
from replica.attention.backend import check_served, settled
from replica.attention.kv_pages import LayerShape
from replica.config import ReplicaConfig, num_host_blocks
from replica.device_errors import is_out_of_memory
from replica.layers import card_block, decoder_block
from replica.layers.packed_linear import PackedLinear
from replica.layers.screened_head import keeps_order, screen_bytes, screen_head
from replica.memory import free_host_bytes
from replica.models import config_rules, model_probe
from replica.models.model_source import ModelRefused, NotEnoughMemory, ResolvedModel, stored_dtype
from replica.models.weight_files import weight_bytes

logger = logging.getLogger(__name__)

# On a card, of what a measured step took: attention's own scratch memory, the sampler's, and the gaps that
# the allocator leaves between pieces come on top.
STEP_HEADROOM = 1.5

# Of free memory, for what only makes greedy tokens faster, unless it is asked for by name.
SCREEN_MEMORY_SHARE = 0.25


def choose_device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        # Whoever serves may have said auto, which is CUDA where Ray has GPUs: it is no way out.
        why = ""
        if torch.version.cuda is None:
            why = f": torch {torch.__version__} is built for CPUs alone"
        raise ConfigError("device", name, f"torch sees no CUDA device{why}; device: cpu does without")
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(name: str, device: torch.device, resolved: ResolvedModel) -> torch.dtype:
    """auto: as `deploy/app.py` settles it for Routers and replicas."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else stored_dtype(resolved)
    return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[name]


def choose_length(config: ReplicaConfig, resolved: ResolvedModel, model_config: Any) -> int:
    """The longest sequence served, tokens. Raises ConfigError when more is asked than the model knows."""
    limit = config_rules.length_limit(model_config) or resolved.max_model_len
    if config.max_model_len is None:
        if limit is None:
            raise ConfigError("max_model_len", None, f"{resolved.source} does not say its limit: set one")
        return limit
    if limit is not None and config.max_model_len > limit:
        raise ConfigError("max_model_len", config.max_model_len, f"{resolved.source} knows {limit} positions")
    return config.max_model_len


def check_memory_for_weights(
    config: ReplicaConfig, resolved: ResolvedModel, device: torch.device, dtype: torch.dtype
) -> None:
    """Before loading: the weights must fit. What is left for pages is checked when their shape is known.

    On their way to a card they pass through the host. Stored as they are served they are mapped there from
    their files; converted, they take memory. Raises NotEnoughMemory.
    """
    name = str(dtype).removeprefix("torch.")
    needed = weight_bytes(resolved, name)
    free = kv_pages.free_share_bytes(device, config.device_share)
    if needed > free:
        raise NotEnoughMemory(resolved.source, needed, free, _place(config, device), "its weights")
    if device.type != "cpu" and stored_dtype(resolved) != name and needed > (here := free_host_bytes()):
        purpose = f"its weights as {name}, on their way to {device}"
        raise NotEnoughMemory(resolved.source, needed, here, "the host", purpose)


@contextmanager
def refusals(source: str, device: torch.device) -> Iterator[None]:
    """What is found out meanwhile, told as a refusal of the model: of a family that is not served, and of
    memory that ran out, which says nothing of the family, whoever met it. Raises ModelRefused; other errors
    pass."""
    try:
        yield
    except (model_probe.Unsupported, RuntimeError, MemoryError) as error:
        cause = error.__cause__ or error
        if is_out_of_memory(cause):
            told = str(cause) or type(cause).__name__
            raise ModelRefused(
                source, f"needs more memory than {device} has beside its weights: {told}"
            ) from error
        if isinstance(error, model_probe.Unsupported):
            raise ModelRefused(source, f"cannot be served: {error}") from error
        raise


def head_to_screen(config: ReplicaConfig, model: Any) -> nn.Linear | None:
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
    if config.greedy_screen == "on" and not can_be:
        reason = "needs float32 on a CPU, and an output layer whose logits keep their order"
        logger.warning("greedy tokens are not screened", extra={"reason": reason})
    return head if can_be else None


def screen_if_faster(
    config: ReplicaConfig,
    source: str,
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
        raise NotEnoughMemory(source, needed, free, "cpu", "greedy_screen: on")
    to_spare = SCREEN_MEMORY_SHARE * (free - (config.num_blocks or 0) * block_bytes)
    if config.greedy_screen == "auto" and needed > to_spare:
        logger.info("greedy tokens are not screened", extra={"reason": "memory", "needed_bytes": needed})
        return
    measured = config.greedy_screen == "auto"
    screened = screen_head(linear, packed, rows, is_shared=is_shared, measured=measured)
    if screened is not None:
        model.set_output_embeddings(screened)
        logger.info("greedy tokens are screened", extra={"bytes": needed})


def fuse_layers(config: ReplicaConfig, model: Any, run: Callable[[], object]) -> int:
    """Put ours in decoder layers' places, where they answer alike; how many. run: as `swap_layers`.

    By Triton's kernels where attention is computed by them. config: with the backend settled.
    """
    if not config.fused_layers:
        return 0
    if config.attention_backend == "triton":
        return card_block.fuse_blocks(model, run)
    return decoder_block.fuse_blocks(model, run)


def check_backend(config: ReplicaConfig, device: torch.device, dtype: torch.dtype, model_config: Any) -> None:
    """Before loading: raises ConfigError where the backend that is asked for cannot serve the model.

    The layers' shapes come from the model without its weights. A family that does not run without them is
    judged by device, dtype and block size now, and by its layers when it is loaded.
    """
    if config.attention_backend == "auto":
        return
    try:
        shapes = model_probe.shapes_without_weights(model_config, dtype)
    except model_probe.Unsupported:
        shapes = []
    check_served(config.attention_backend, device, dtype, shapes, config.block_size)


def settle_backend(config: ReplicaConfig, model: Any, shapes: Sequence[LayerShape]) -> ReplicaConfig:
    """With a backend's name in the place of "auto"."""
    return replace(
        config, attention_backend=settled(config.attention_backend, model.device, model.dtype, shapes)
    )


def choose_num_host_blocks(config: ReplicaConfig, source: str, block_bytes: int) -> int:
    """Blocks that `host_cache_gib` holds. Raises NotEnoughMemory, ConfigError if that is not one."""
    if not config.host_cache_gib:
        return 0
    wanted, free = int(config.host_cache_gib * (1 << 30)), free_host_bytes()
    if wanted > free:
        raise NotEnoughMemory(source, wanted, free, "the host", "host_cache_gib")
    return num_host_blocks(config.host_cache_gib, block_bytes)


def choose_num_blocks(
    config: ReplicaConfig, source: str, model: Any, shapes: list[LayerShape], max_model_len: int
) -> int:
    """Blocks asked for, or as many as the allowed share of free memory holds.

    Raises NotEnoughMemory, and ConfigError for steps that do not fit even without blocks.

    Free is what neither the model holds nor a full step takes for a while, which a card is asked for.
    """
    device, dtype = model.device, model.dtype
    block_bytes = kv_pages.bytes_per_block(shapes, config.block_size, dtype)
    step_tokens = min(config.max_batched_tokens, max_model_len)
    # Of as many sequences as there may be: several short ones fill a step, too.
    with_decodes = min(config.max_batched_tokens + config.max_running, config.max_running * max_model_len)
    num_rows = min(config.max_running, with_decodes)
    try:
        needed_by_steps = step_bytes(model, with_decodes, num_rows, max_model_len)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        accepted = f"must be less: {with_decodes} tokens in a step do not fit beside the weights on {device}"
        raise ConfigError("max_batched_tokens", config.max_batched_tokens, accepted) from error
    free = max(0, kv_pages.free_share_bytes(device, config.device_share) - needed_by_steps)
    if config.num_blocks is not None:
        needed = config.num_blocks * block_bytes
        if needed > free:
            purpose = f"{config.num_blocks} KV blocks"
            raise NotEnoughMemory(source, needed, free, _place(config, device), purpose)
        return config.num_blocks
    fewest = -(-step_tokens // config.block_size)  # one full step
    num_blocks = kv_pages.blocks_from_memory(free, config.kv_memory_fraction, block_bytes, device)
    if num_blocks < fewest:
        share = int(free * config.kv_memory_fraction)
        purpose = f"the KV blocks of a single step (kv_memory_fraction is {config.kv_memory_fraction})"
        raise NotEnoughMemory(source, fewest * block_bytes, share, _place(config, device), purpose)
    logger.info(
        "memory for blocks",
        extra={"free_bytes": free, "step_bytes": needed_by_steps, "num_blocks": num_blocks},
    )
    return num_blocks


def _place(config: ReplicaConfig, device: torch.device) -> str:
    """Where memory is short; of a card that is shared, how much of it is meant."""
    if device.type != "cuda" or config.device_share >= 1:
        return str(device)
    return f"{device} (device_share is {config.device_share:g})"


def step_bytes(model: Any, num_tokens: int, num_rows: int, max_model_len: int) -> int:
    """Memory that a step of so many tokens and drawn rows takes for a while on the card, with headroom.

    Measured by a forward whose attention has no pages. 0 on a CPU: the system's own estimate of free memory
    counts what it can take back, and a step there takes little beside the weights.
    """
    if model.device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    model_probe.run_without_pages(model, num_tokens, num_rows, max_model_len)
    taken = torch.cuda.max_memory_allocated(model.device) - held
    torch.cuda.empty_cache()
    return int(taken * STEP_HEADROOM)


def eos_token_ids(model: Any, tokenizers: int | None) -> frozenset[int]:
    """Ids that end a generation: the generation config's where it names some, else the config's.

    tokenizers: the tokenizer's own, which ends one, too. A model that was trained to end its turns otherwise
    than its base often says so nowhere else.
    """
    own = frozenset() if tokenizers is None else frozenset([tokenizers])
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        value = getattr(config, "eos_token_id", None)
        ids = frozenset([value] if isinstance(value, int) else value or ())  # [] names none, as null does
        if ids:
            return ids | own
    return own
