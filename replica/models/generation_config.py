"""What a model's generation_config.json says of how its tokens are to be drawn, and how many.

Knows the file; which values can be had, and whether it counts, is the Router's.
"""

from __future__ import annotations

from typing import Any

from replica.models.model_source import GENERATION_CONFIG, ResolvedModel, read_json

_LENGTH = "max_new_tokens"
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(resolved: ResolvedModel) -> dict[str, Any]:
    """The fields that it sets, under the API's names; of a draw none where it says `do_sample: false`.

    `max_length` is left out: it counts the prompt, too, and `max_model_len` says what fits the context.
    Raises ModelRefused for a file that cannot be read.
    """
    path = resolved.folder / GENERATION_CONFIG
    found = read_json(resolved.source, path) if path.exists() else {}
    lengths = {} if found.get(_LENGTH) is None else {"max_tokens": found[_LENGTH]}
    if found.get("do_sample") is False:  # the others say nothing then: some are left over from training
        return lengths
    return {name: found[name] for name in FIELDS if found.get(name) is not None} | lengths
