"""The tokenizer of a model folder, or a refusal that names the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replica.models import tiny_model
from replica.models.model_source import ModelRefused, resolve
from replica.models.tokenizer_source import load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model.ensure_built(), tmp_path / "model"))


def cut(path: Path) -> None:
    path.write_text(path.read_text()[:200])


def templates(folder: Path, value: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": value}))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda f: cut(f / "tokenizer.json"), r"tokenizer\.json cannot be read: .* line \d+ column"),
    "empty": (lambda f: (f / "tokenizer.json").write_text(""), r"tokenizer\.json cannot be read: "),
    "no object": (
        lambda f: (f / "tokenizer.json").write_text("[]"),
        r"tokenizer\.json is not a JSON object; fetch it",
    ),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        r"cannot be loaded from tokenizer\.json: ",
    ),
    "bytes": (
        lambda f: (f / "tokenizer.json").write_bytes(b'{"a": "\xff"}'),
        r"tokenizer\.json cannot be read: 'utf-8' codec",
    ),
    "settings cut": (lambda f: cut(f / "tokenizer_config.json"), r"tokenizer_config\.json cannot be read: "),
    "old names cut": (
        lambda f: (f / "special_tokens_map.json").write_text('{"bos'),
        r"special_tokens_map\.json cannot be read: .*; fetch it again, or mend it",
    ),
    "a number for a template": (lambda f: templates(f, 7), r"the chat_template of tokenizer_config\.json is"),
    "a template without name": (
        lambda f: templates(f, [{"template": "{{ messages }}"}]),
        r"the chat_template of tokenizer_config\.json is neither a text nor a list",
    ),
    "a template of other bytes": (
        lambda f: (f / "chat_template.jinja").write_bytes(b"\xff{{ messages }}"),
        r"chat_template\.jinja cannot be read: UnicodeDecodeError",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_damaged_file_is_named(folder: Path, damage: str) -> None:
    """It was the error of whoever read it: "Expecting value: line 3394 column 4", of no file."""
    harm, said = DAMAGES[damage]
    harm(folder)
    with pytest.raises(ModelRefused, match=said):
        load_tokenizer(resolve(str(folder)))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3", "knows no words"),  # transformers makes an empty one up
        ("gemma2", "knows no words"),
        ("llama", "its tokenizer cannot be loaded"),
    ],
)
def test_a_folder_without_a_tokenizer_is_refused(folder: Path, family: str, reason: str) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelRefused, match=reason):
        load_tokenizer(resolve(str(folder)))


def test_a_tokenizer_that_a_later_version_wrote_is_refused(folder: Path) -> None:
    """The library raises a bare Exception for it."""
    written = json.loads((folder / "tokenizer.json").read_text())
    written["model"]["type"] = "Later"
    (folder / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(ModelRefused, match=r"loaded from tokenizer\.json: Exception: data did not match"):
        load_tokenizer(resolve(str(folder)))


def test_the_tokenizer_beside_a_model_is_loaded(folder: Path) -> None:
    tokenizer = load_tokenizer(resolve(str(folder)))
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
