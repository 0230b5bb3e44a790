"""Small random models of many families, saved to disk the way a real checkpoint is.

Used by the exactness tests on CPU and GPU. Weights are drawn wide and embeddings untied, because an
untrained network otherwise repeats one token and agreement would prove little.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 199
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """One architecture, small: what makes it differ is kept, sizes are not."""

    name: str
    model_type: str
    changes: dict[str, Any]

    def config(self) -> dict[str, Any]:
        merged = {**COMMON, **self.changes}
        return {key: value for key, value in merged.items() if value is not ...}


def _without(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, ...)


FAMILIES = [
    Family("llama", "llama", {}),
    Family("llama3-rope", "llama", {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    }),
    Family("qwen2-mixed-windows", "qwen2", {
        "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, **_without("head_dim"),
    }),
    Family("qwen3", "qwen3", {}),
    Family("mistral-window", "mistral", {"sliding_window": 24}),
    Family("gemma2-softcap-window", "gemma2", {
        "sliding_window": 24, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    }),
    Family("gemma3-window", "gemma3_text", {"sliding_window": 24, "query_pre_attn_scalar": 16}),
    Family("phi3-window", "phi3", {"sliding_window": 24, **_without("head_dim")}),
    Family("gpt2", "gpt2", {
        "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512,
        **_without("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                   "num_key_value_heads", "head_dim", "max_position_embeddings"),
    }),
    Family("gpt-neox", "gpt_neox", {**_without("head_dim", "num_key_value_heads")}),
    Family("qwen3-moe", "qwen3_moe", {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    }),
    Family("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    Family("gpt-oss-sinks", "gpt_oss", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }),
    Family("deepseek-v3-latent", "deepseek_v3", {
        "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
        "n_shared_experts": 1, **_without("head_dim"),
    }),
    Family("olmo2", "olmo2", {**_without("head_dim")}),
    Family("stablelm", "stablelm", {**_without("head_dim")}),
]  # fmt: skip


def save_model(family: Family, folder: Path, seed: int = 7) -> Path:
    """Write config.json and model.safetensors of a random model. Returns the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family.model_type, **family.config())
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "bias")):  # drawn as zeros or left as they are: make them count
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def write_config(folder: Path, **values: Any) -> Path:
    """A model folder with nothing but a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder
