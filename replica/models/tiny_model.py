"""The embedded model: a small Qwen3-type network with seeded weights, for machines without a download.

The tokenizer, its chat template and the config are committed under `replica/models/tiny/`; the weights are
drawn at first start into a cache folder and then read like any other model's. It speaks nonsense.

    python -m replica.models.tiny_model train    train the tokenizer again (deterministic; a reviewed diff)
    python -m replica.models.tiny_model build    draw the weights now and print their folder

Needs numpy only: neither torch nor transformers is imported here, except to train.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

MODEL_ID = "tiny"
SOURCE = Path(__file__).parent / "tiny"
COMMITTED_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")

# Another value makes other weights: every cached answer, recorded output and demo table changes with it.
WEIGHT_SEED = 20260101
FORMAT_VERSION = 1  # raise it when the weights are drawn differently from the same config and seed

VOCAB_SIZE_LIMIT = 4096
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)


def cache_root() -> Path:
    """Where generated files live: $WARMPATH_CACHE, else $XDG_CACHE_HOME/warmpath, else ~/.cache/warmpath."""
    if override := os.environ.get("WARMPATH_CACHE"):
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "warmpath"


def folder() -> Path:
    """Where this version's weights are, or will be: the name changes with config, tokenizer and seed."""
    digest = hashlib.sha256(f"{FORMAT_VERSION} {WEIGHT_SEED}".encode())
    for name in COMMITTED_FILES:
        digest.update(name.encode() + b"\0" + (SOURCE / name).read_bytes() + b"\0")
    return cache_root() / f"tiny-{digest.hexdigest()[:16]}"


def ensure_built() -> Path:
    """The complete model folder, drawn now if this is the first start. Safe to call in many processes.

    Everything is written beside the final folder and renamed into place, so that nobody ever reads
    half a file; the process that comes second finds the name taken and drops its own copy.
    """
    final = folder()
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        for name in COMMITTED_FILES:
            shutil.copyfile(SOURCE / name, draft / name)
        config = json.loads((SOURCE / "config.json").read_text())
        save_file(
            dict(draw_weights(config, WEIGHT_SEED)), draft / "model.safetensors", metadata={"format": "pt"}
        )
        draft.chmod(0o755)  # mkdtemp and safetensors write private files; a shared cache has other readers
        (draft / "model.safetensors").chmod(0o644)
        try:
            draft.rename(final)
        except OSError:
            if not final.is_dir():  # a real failure, not the race
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # gone already when the rename went through
    return final


def draw_weights(config: dict[str, Any], seed: int) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Every parameter of a Qwen3 network by name, in a fixed order: float32, the same on every machine.

    Uniform with the standard deviation `initializer_range`, from PCG64's raw bits: those are promised
    to be stable across numpy versions and platforms, numpy's own distributions are not.
    """
    bits = np.random.PCG64(seed)
    half_width = config["initializer_range"] * 3**0.5

    def uniform(*shape: int) -> npt.NDArray[np.float32]:
        raw = np.asarray(bits.random_raw(int(np.prod(shape))), dtype=np.uint64)
        unit = (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)  # [0, 1), exact
        return ((unit * np.float32(2) - np.float32(1)) * np.float32(half_width)).reshape(shape)

    def ones(size: int) -> npt.NDArray[np.float32]:
        return np.ones(size, dtype=np.float32)

    hidden, mlp, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", uniform(config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", ones(hidden)
        yield f"{layer}.self_attn.q_proj.weight", uniform(queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", uniform(keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", uniform(keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", uniform(hidden, queries)
        yield f"{layer}.self_attn.q_norm.weight", ones(head)
        yield f"{layer}.self_attn.k_norm.weight", ones(head)
        yield f"{layer}.post_attention_layernorm.weight", ones(hidden)
        yield f"{layer}.mlp.gate_proj.weight", uniform(mlp, hidden)
        yield f"{layer}.mlp.up_proj.weight", uniform(mlp, hidden)
        yield f"{layer}.mlp.down_proj.weight", uniform(hidden, mlp)
    yield "model.norm.weight", ones(hidden)
    yield "lm_head.weight", uniform(config["vocab_size"], hidden)


# Functions come before everything else, so that chats with the same ones share them in the cache.
CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\nFunctions that may be called:\\n' -}}
{%- for tool in tools -%}{{- (tool | tojson) ~ '\\n' -}}{%- endfor -%}
{{- 'Write calls as\\n<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('unknown role: ' ~ message['role']) -}}
{%- endif -%}
{{- '<|im_start|>' ~ message['role'] ~ '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] or [] -%}
{%- if part['type'] != 'text' -%}
{{- raise_exception('this model reads text only, not ' ~ part['type']) -}}
{%- endif -%}
{{- part['text'] -}}
{%- endfor -%}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{{- '\\n' if message['content'] or not loop.first -}}
{{- '<tool_call>\\n{"name": ' ~ (call['function']['name'] | tojson) -}}
{{- ', "arguments": ' ~ (call['function']['arguments'] | tojson) ~ '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def train_tokenizer(corpus: list[str], target: Path) -> int:
    """Train the byte-level BPE tokenizer on `corpus`, write all committed files, return the vocabulary size.

    Deterministic: the same corpus gives the same files, byte for byte.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # Digits one by one: ids and telephone numbers then cost tokens in proportion to their length.
    split = Regex(
        r"'(?:s|t|re|ve|m|ll|d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE_LIMIT,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(target / "tokenizer_config.json", _tokenizer_config())
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    size: int = tokenizer.get_vocab_size()
    _write_json(target / "config.json", _model_config(size, ids))
    _write_json(
        target / "generation_config.json",
        {"eos_token_id": [ids[TURN_END], ids[END_OF_TEXT]], "pad_token_id": ids[END_OF_TEXT]},
    )
    return size


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32768,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _model_config(vocab_size: int, ids: dict[str, int | None]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-06,
        "initializer_range": 0.1,  # at the usual 0.02 an untrained network repeats one token for ever
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,  # tied and untrained, it would repeat its last token for ever
        "use_cache": True,
        "eos_token_id": ids[TURN_END],
        "pad_token_id": ids[END_OF_TEXT],
        "dtype": "float32",
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m replica.models.tiny_model", description="The embedded tiny model."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "train",
        help="train the tokenizer on LICENSE and corpus.txt, rewrite replica/models/tiny/",
    )
    commands.add_parser("build", help="draw the weights into the cache folder and print where they are")
    if parser.parse_args(arguments).command == "train":
        corpus = [(SOURCE.parents[1] / "LICENSE").read_text(), (SOURCE / "corpus.txt").read_text()]
        sys.stdout.write(f"{train_tokenizer(corpus, SOURCE)} tokens in {SOURCE}\n")
    else:
        sys.stdout.write(f"{ensure_built()}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
