"""Small networks of many families, saved to disk, and what transformers itself answers with them.

Shared by the exactness tests on CPU and on CUDA; `family_engines.py` has what is held beside it. Needs
neither Ray nor sockets.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from replica.models.tiny_model import SOURCE

VOCABULARY = 1856  # at least the tiny tokenizer's
MAX_NEW_TOKENS = 16

# Untied and wide: tied or narrow random networks repeat one token, and then any attention would do.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,  # nothing ends a generation early, there or here
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True, slots=True)
class Family:
    """One model type and the settings that make it small; `settings` come on top of COMMON."""

    name: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # settings of COMMON that this type does not know

    def config(self) -> Any:
        from transformers import AutoConfig

        common = {key: value for key, value in COMMON.items() if key not in self.without}
        return AutoConfig.for_model(self.model_type, **{**common, **self.settings})


FAMILIES = (
    Family(
        "llama",
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    Family(
        "qwen2",
        "qwen2",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        },
    ),
    Family("qwen3", "qwen3", {"head_dim": 32}),
    Family("mistral", "mistral", {"sliding_window": 10}),  # smaller than the prompts, and than a block
    Family(
        "gemma2",
        "gemma2",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 18,
            "layer_types": MIXED,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 20.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    Family(
        "gemma3",
        "gemma3_text",
        {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": 12, "layer_types": MIXED},
    ),
    Family("phi3", "phi3", {"sliding_window": 24}),
    Family("gpt2", "gpt2", {"n_inner": 96}, without=("intermediate_size", "num_key_value_heads")),
    Family(
        "qwen3_moe",
        "qwen3_moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    Family(  # attention sinks
        "gpt_oss",
        "gpt_oss",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 18,
            "layer_types": MIXED,
        },
    ),
    Family(  # keys wider than values
        "deepseek_v3",
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
)

MORE_FAMILIES = (  # in the long suite
    Family("olmo2", "olmo2"),
    Family(  # learned positions
        "opt",
        "opt",
        {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2},
        without=("intermediate_size", "num_key_value_heads", "initializer_range"),
    ),
    Family("gpt_neox", "gpt_neox", {"rotary_pct": 0.5}, without=("num_key_value_heads",)),
    Family("llama-plain-rope", "llama"),
    Family("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("gemma", "gemma", {"head_dim": 16}),
    Family("phi", "phi"),
    Family("granite", "granite"),
    Family("smollm3", "smollm3"),
    Family("starcoder2", "starcoder2", {"sliding_window": 14}),
    Family("stablelm", "stablelm"),
    Family("nemotron", "nemotron"),
    Family("cohere2", "cohere2", {"sliding_window": 14, "num_hidden_layers": 3, "layer_types": MIXED}),
    Family("glm4", "glm4", {"head_dim": 16}),
    Family("exaone4", "exaone4", {"sliding_window": 14, "num_hidden_layers": 3, "layer_types": MIXED}),
)


def save(family: Family, folder: Path) -> Path:
    """Draw the family's weights (seeded) and write a model folder as a user would have it."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(family.config(), dtype=torch.float32)
        _stir(model)
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return folder


def add_tokenizer(folder: Path) -> None:
    """Put the embedded model's tokenizer beside a model: no folder is one without it."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SOURCE / name, folder / name)


def _stir(model: torch.nn.Module) -> None:
    """Give what starts as a constant (norms, biases, sinks) values that matter."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter.data, mean=float(parameter.data.mean()), std=0.2)


@lru_cache(maxsize=1)
def prompts() -> tuple[tuple[int, ...], ...]:
    """Shared prefixes, exact multiples of both block sizes, length 1, identical pairs, strangers."""

    def text(seed: int, length: int) -> tuple[int, ...]:
        return tuple((seed * 7919 + index * index * 31 + index * 101) % 1800 for index in range(length))

    long_prefix, short_prefix = text(1, 48), text(2, 33)
    return (
        long_prefix + text(3, 9),
        text(4, 1),
        short_prefix + text(5, 4),
        text(6, 16),
        long_prefix,
        text(7, 70),
        long_prefix + text(8, 16),
        text(7, 70),  # an identical pair
        short_prefix,
        text(9, 32),
        short_prefix + text(10, 31),
        text(11, 5),
        text(9, 32),  # and one whose length is a multiple of the block size
        long_prefix[:20],
        text(12, 17),
        text(13, 2),
    )


def expected(folder: Path, device: torch.device) -> list[tuple[int, ...]]:
    """What transformers itself answers: `generate`, greedy, eager attention, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = model.to(device).eval()
    model.generation_config.eos_token_id = None  # every answer has its full length
    answers: dict[tuple[int, ...], tuple[int, ...]] = {}
    for prompt in set(prompts()):
        inputs = torch.tensor([prompt], device=device)
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        answers[prompt] = tuple(output[0, len(prompt) :].tolist())
    return [answers[prompt] for prompt in prompts()]
