"""The embedded model: the same weights everywhere, built once however many start at once."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from replica.models import tiny_model
from replica.models.tiny_model import COMMITTED_FILES, SOURCE, draw_weights

ROOT = Path(__file__).parents[4]

BUILD = "from replica.models.tiny_model import ensure_built; print(ensure_built())"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WARMPATH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def python(program: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def digest(folder: Path) -> str:
    """Of every parameter's name, shape and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        found.update(f"{name} {tensor.shape} {tensor.dtype}".encode() + tensor.tobytes())
    return found.hexdigest()


def test_weights_are_the_same_on_every_machine() -> None:
    """Golden: other weights change every cached answer, recorded output and demo table."""
    assert digest(tiny_model.ensure_built()) == (
        "eec961bb011f53ead1ef56b9da8953de7fb4e38a70f6395fd6fcf49bb97c0740"
    )


def test_two_builds_differ_in_nothing(tmp_path: Path) -> None:
    """Not even in the file's bytes: the folder's revision, and so every block hash, rests on them."""
    contents = []
    for seed in ("1", "2"):
        build = python(BUILD, PYTHONHASHSEED=seed, WARMPATH_CACHE=str(tmp_path / seed))
        folder = Path(build.communicate()[0].strip())
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert contents[0] == contents[1]
    assert set(contents[0]) == {*COMMITTED_FILES, "model.safetensors"}


def test_processes_that_build_at_once_do_not_collide(own_cache: Path) -> None:
    builds = [python(BUILD) for _ in range(4)]
    folders = {build.communicate(timeout=60)[0].strip() for build in builds}
    assert [build.returncode for build in builds] == [0] * 4
    assert folders == {str(tiny_model.folder())}
    assert [path.name for path in own_cache.iterdir()] == [tiny_model.folder().name]  # no drafts left


def test_neither_torch_nor_transformers_is_imported_to_build_or_to_find() -> None:
    """They take seconds: a second start has nothing to do and must be fast."""
    program = (
        BUILD + "; import sys; print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    for _ in range(2):
        assert python(program).communicate()[0].splitlines()[1] == "[]"


def test_a_second_start_reads_what_the_first_built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tiny_model.folder().exists()
    assert tiny_model.ensure_built() == tiny_model.folder()

    def never(*arguments: object) -> None:
        raise AssertionError("drawn again")

    monkeypatch.setattr(tiny_model, "draw_weights", never)
    assert tiny_model.ensure_built() == tiny_model.folder()


def test_a_build_that_fails_leaves_nothing_and_the_next_succeeds(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tiny_model, "save_file", full)
        with pytest.raises(OSError, match="No space left"):
            tiny_model.ensure_built()
    assert list(own_cache.iterdir()) == []
    assert tiny_model.ensure_built().is_dir()


def test_other_users_may_read_a_shared_cache() -> None:
    folder = tiny_model.ensure_built()
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o044 for path in folder.iterdir()} == {0o044}


def test_the_folders_name_changes_with_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {tiny_model.folder().name}
    for name in COMMITTED_FILES:
        edited = tmp_path / name
        edited.mkdir()
        for each in COMMITTED_FILES:
            (edited / each).write_bytes((SOURCE / each).read_bytes() + (b" " if each == name else b""))
        monkeypatch.setattr(tiny_model, "SOURCE", edited)
        names.add(tiny_model.folder().name)
    monkeypatch.setattr(tiny_model, "WEIGHT_SEED", 1)
    names.add(tiny_model.folder().name)
    assert len(names) == len(COMMITTED_FILES) + 2


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WARMPATH_CACHE": "/a/b"}, "/a/b"),
        ({"WARMPATH_CACHE": "", "XDG_CACHE_HOME": "/x"}, "/x/warmpath"),
        ({"WARMPATH_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/home/u"}, "/home/u/.cache/warmpath"),
    ],
)
def test_where_generated_files_go(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tiny_model.cache_root() == Path(expected)


def test_the_committed_tokenizer_and_configs_are_what_training_writes(tmp_path: Path) -> None:
    """Nobody edits them by hand: the corpus is the source."""
    corpus = [(ROOT / "LICENSE").read_text(), (SOURCE / "corpus.txt").read_text()]
    tiny_model.train_tokenizer(corpus, tmp_path)
    for name in COMMITTED_FILES:
        assert (tmp_path / name).read_text() == (SOURCE / name).read_text(), name


def _config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((SOURCE / "config.json").read_text())
    return config


def test_weights_fill_the_network_its_config_describes() -> None:
    config = _config()
    weights = dict(draw_weights(config, seed=1))
    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert len(weights) == 3 + 11 * config["num_hidden_layers"]
    assert {tensor.dtype for tensor in weights.values()} == {np.dtype(np.float32)}
    matrix = weights["model.layers.3.mlp.up_proj.weight"]
    assert float(matrix.std()) == pytest.approx(config["initializer_range"], rel=0.01)
    assert abs(float(matrix.mean())) < 0.1 * config["initializer_range"]


def test_another_seed_is_another_network() -> None:
    config = {**_config(), "vocab_size": 8, "num_hidden_layers": 1}
    one, same, other = (dict(draw_weights(config, seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["lm_head.weight"], other["lm_head.weight"])


# -- its tokenizer --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SOURCE)


@pytest.mark.parametrize(
    "text", ["", "plain", "Zoë paid 12 € — ok?\n\t\x00", "漢字 🙂 \u202b", "a" * 500, "1234567890"]
)
def test_any_text_comes_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text


def test_every_id_fits_the_network_and_specials_are_single_tokens(tokenizer: Any) -> None:
    assert len(tokenizer) == _config()["vocab_size"]
    for token in tiny_model.SPECIAL_TOKENS:
        assert len(tokenizer.encode(token)) == 1


def test_a_digit_is_a_token(tokenizer: Any) -> None:
    """Ids and telephone numbers cost tokens in proportion to their length."""
    assert len(tokenizer.encode("90210")) == 5


def test_the_chat_template_marks_turns_and_opens_the_answer(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    ended = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.startswith(ended)


def test_the_chat_template_writes_functions_and_calls(tokenizer: Any) -> None:
    """As they are read back: `router/openai_api/tool_calls.py`."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "See:", "tool_calls": [call, call]},
        {"role": "tool", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    plain = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith(plain)
    assert json.dumps(tools[0]) in text.removesuffix(plain)
    written = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\nSee:\n{written}\n{written}<|im_end|>\n" in plain
    only_calls = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert f"<|im_start|>assistant\n{written}" in tokenizer.apply_chat_template(only_calls, tokenize=False)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "wizard", "content": "x"}, "unknown role: wizard"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "reads text only, not image_url"),
    ],
)
def test_the_chat_template_refuses_what_it_cannot_say(
    tokenizer: Any, message: dict[str, Any], reason: str
) -> None:
    from jinja2.exceptions import TemplateError

    with pytest.raises(TemplateError, match=reason):
        tokenizer.apply_chat_template([message], tokenize=False)


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_model.main(["build"]) == 0
    assert capsys.readouterr().out.strip() == str(tiny_model.folder())
