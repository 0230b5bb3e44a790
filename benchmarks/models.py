"""Builds the benchmarks' networks as model folders that the real loader accepts.

Config and seeded weights from transformers, the embedded model's tokenizer beside them: prompts are token
ids, so the tokenizer only has to be there.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cases import ModelSpec
from replica.models import tiny_model

if TYPE_CHECKING:
    import torch

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def build(spec: ModelSpec, parent: Path) -> Path:
    """The folder with config, safetensors and tokenizer; drawn now unless it is there. Imports torch.

    Call it from one process before others read the folder.
    """
    folder = parent / spec.name
    if folder.is_dir():
        return folder
    import torch
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(spec.seed)
    config = config_of(spec, "float32")
    draft = parent / f".{spec.name}"
    Qwen3ForCausalLM(config).save_pretrained(draft)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tiny_model.SOURCE / name, draft / name)
    return draft.rename(folder)


def config_of(spec: ModelSpec, dtype: str) -> Any:
    """The network's transformers config."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=spec.vocabulary,
        hidden_size=spec.hidden,
        intermediate_size=spec.mlp,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_positions,
        # A random network with tied embeddings repeats one token, which would prove nothing.
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,  # every request runs to its last token
        pad_token_id=0,
        dtype=dtype,
    )


def on_device(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Any:
    """The network drawn where it will run, in eval mode: no file, and no copy of it in the host's memory.

    Seeded: the same weights every time on the same kind of device.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(spec.seed)
    config = config_of(spec, str(dtype).removeprefix("torch."))
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
