"""What two processes must agree on before one's block hashes mean anything to the other.

A Router matches only replicas with its own fingerprint, routes others by load, and never sends
them its hashes; to those of another model it sends nothing: so a rolling change of any field is safe.
Reads a model folder's config and weight headers; never loads weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

# What the format itself allows: a corrupt length must not make us read the weights.
_MAX_HEADER_BYTES = 100_000_000


class HashAlgorithm(StrEnum):
    """How blocks are hashed. Both give 128 bits, stable across processes and restarts."""

    XXH3_128 = "xxh3_128"  # fast; fine while one tenant owns every prompt
    SHA256 = "sha256"  # truncated to 128 bits; nobody can forge a collision


class SaltMode(StrEnum):
    """Where a request's cache salt comes from."""

    REQUEST = "request"  # the body's `cache_salt`, empty when absent
    TENANT = "tenant"  # derived from the API key, joined with the body's
    SHARED = "shared"  # one cache for all; the body's `cache_salt` is refused


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that decides a prompt's block hashes, except the request's own adapter and salt."""

    model_id: str
    revision: str  # commit, or `folder_revision` of a local folder
    kv_dtype: str  # "float32", "bfloat16", ...
    template_digest: str  # of the chat template: another template tokenizes chats otherwise
    block_size: int
    hash_algorithm: HashAlgorithm
    salt_mode: SaltMode = SaltMode.REQUEST

    def is_same_model(self, other: Fingerprint) -> bool:
        """Whether token ids mean the same to both, and either may go on with the other's answers.

        By the revision alone: a folder that was moved or renamed holds the same model.
        """
        return self.revision == other.revision

    def digest(self) -> str:
        """32 hex digits; equal exactly when all fields are equal."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


ChatTemplate = str | Mapping[str, str] | None
"""As a tokenizer has it: one template, several by name, or none."""


def template_digest(chat_template: ChatTemplate) -> str:
    """16 hex digits naming a chat template, or all of several; the empty string when there is none."""
    if not chat_template:
        return ""
    text = (
        chat_template if isinstance(chat_template, str) else json.dumps(dict(chat_template), sort_keys=True)
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def folder_revision(folder: Path) -> str:
    """Digest of a local model folder: config.json, tokenizer.json and every safetensors header.

    Headers name each tensor with dtype and shape, so this reads kilobytes, not the weights.
    Raises OSError when a file cannot be read.
    """
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        path = folder / name
        digest.update(name.encode() + b"\0" + (path.read_bytes() if path.exists() else b"") + b"\0")
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.name.encode() + b"\0" + _safetensors_header(path) + b"\0")
    return digest.hexdigest()[:40]


def _safetensors_header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(min(length, _MAX_HEADER_BYTES))
