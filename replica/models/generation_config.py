"""What a model's generation_config.json says of how its tokens are to be drawn.

Knows the file; which values can be had, and whether it counts, is the Router's.
"""

from __future__ import annotations

from typing import Any

from replica.models.model_source import GENERATION_CONFIG, ResolvedModel, read_json

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(resolved: ResolvedModel) -> dict[str, Any]:
    """The fields that it sets, as they stand there; none where it says not to sample (`do_sample: false`).

    Raises ModelRefused for a file that cannot be read.
    """
    path = resolved.folder / GENERATION_CONFIG
    found = read_json(resolved.source, path) if path.exists() else {}
    if found.get("do_sample") is False:  # the others say nothing then: some are left over from training
        return {}
    return {name: found[name] for name in FIELDS if found.get(name) is not None}
