"""Fingerprints differ whenever anything that decides a hash differs."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from cache.fingerprint import Fingerprint, HashAlgorithm, SaltMode, folder_revision, template_digest
from tests.fakes.cache import a_fingerprint

OTHERS = {
    "model_id": "other",
    "revision": "other",
    "kv_dtype": "bfloat16",
    "template_digest": "other",
    "block_size": 16,
    "hash_algorithm": HashAlgorithm.XXH3_128,
    "salt_mode": SaltMode.SHARED,
}


def test_every_field_changes_the_digest() -> None:
    assert set(OTHERS) == {field.name for field in fields(Fingerprint)}
    digests = {a_fingerprint(**{name: value}).digest() for name, value in OTHERS.items()}
    assert len(digests | {a_fingerprint().digest()}) == len(OTHERS) + 1
    assert a_fingerprint().digest() == a_fingerprint().digest()
    assert len(a_fingerprint().digest()) == 32


def test_template_digest() -> None:
    assert template_digest(None) == template_digest("") == ""
    assert len(template_digest("{{ messages }}")) == 16
    assert template_digest("{{ messages }}") != template_digest("{{ message }}")


def test_named_templates_count_together_in_any_order() -> None:
    """Some tokenizers hold several templates by name; a replica of such a model must start."""
    both = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert template_digest(both) == template_digest(dict(reversed(both.items())))
    assert template_digest(both) != template_digest({**both, "tool_use": "{{ tool }}"})


def a_model(folder: Path, header: bytes = b'{"w": {"dtype": "F32"}}', weights: bytes = b"\0" * 8) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + weights)
    return folder


def test_folder_revision_names_config_tokenizer_and_headers(tmp_path: Path) -> None:
    model = a_model(tmp_path)
    first = folder_revision(model)
    assert len(first) == 40
    assert folder_revision(a_model(tmp_path, weights=b"\1" * 99)) == first, "weights are not read"
    assert folder_revision(a_model(tmp_path, header=b'{"w": {"dtype": "F16"}}')) != first
    (a_model(tmp_path) / "config.json").write_text("{}")
    assert folder_revision(model) != first
    (a_model(tmp_path) / "tokenizer.json").unlink()
    assert folder_revision(model) != first
    (a_model(tmp_path) / "model.safetensors").rename(model / "other.safetensors")
    assert folder_revision(model) != first


def test_a_corrupt_header_length_does_not_read_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache.fingerprint._MAX_HEADER_BYTES", 16)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8 + b"h" * 16 + b"weights")
    first = folder_revision(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8 + b"h" * 16 + b"WEIGHTS")
    assert folder_revision(tmp_path) == first
