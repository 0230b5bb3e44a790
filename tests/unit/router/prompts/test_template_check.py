"""A chat template that cannot be compiled is the model's fault, and found before it is blamed on clients."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cache.errors import ConfigError
from router.prompts.prompt import PromptEncoder
from router.prompts.template_check import template_fault
from tests.fakes.tokenizers import CHATML, TINY, a_tokenizer

BROKEN = "{% for message in messages %}\n{{ message.content }}\n{% endfo %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def in_settings(folder: Path, value: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": value}))


def in_file(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)


def fault(folder: Path) -> str | None:
    return template_fault(AutoTokenizer.from_pretrained(folder), folder)


def test_in_the_settings(folder: Path) -> None:
    in_settings(folder, BROKEN)
    found = fault(folder)
    assert found is not None
    assert found.startswith(
        "line 3 of the chat_template 'default' in tokenizer_config.json is no chat template: "
        "Encountered unknown tag 'endfo'."
    )
    assert found.endswith("; fetch its file again, or mend it")


def test_in_a_file_of_its_own(folder: Path) -> None:
    in_file(folder, "chat_template.jinja", "{{ messages }}\n{{ messages | nonsense }}")
    assert "line 2 of chat_template.jinja is no chat template: No filter named" in str(fault(folder))


@pytest.mark.parametrize("is_file", [True, False])
def test_in_one_of_several(folder: Path, is_file: bool) -> None:
    """Chats with tools alone were refused, one by one."""
    if is_file:
        in_file(folder, "chat_template.jinja", CHATML)
        in_file(folder, "additional_chat_templates/tool_use.jinja", BROKEN)
        where = "line 3 of additional_chat_templates/tool_use.jinja"
    else:
        named = {"default": CHATML, "tool_use": BROKEN}
        in_settings(folder, [{"name": name, "template": text} for name, text in named.items()])
        where = "line 3 of the chat_template 'tool_use' in tokenizer_config.json"
    assert str(fault(folder)).startswith(where)


def test_one_that_nobody_reads_is_no_fault(folder: Path) -> None:
    """A file of its own goes before the settings."""
    in_settings(folder, BROKEN)
    in_file(folder, "chat_template.jinja", CHATML)
    assert fault(folder) is None


@pytest.mark.parametrize(
    "template",
    [None, CHATML, "{{ raise_exception('only tools') }}", "{{ messages[7].content }}", "{{ 1 / 0 }}"],
)
def test_one_that_wants_other_chats_is_a_template(template: str | None) -> None:
    assert template_fault(a_tokenizer("bytes", template=template), None) is None


def test_of_a_tokenizer_from_elsewhere_the_template_is_named() -> None:
    assert str(template_fault(a_tokenizer("bytes", template=BROKEN), None)).startswith(
        "line 3 of its chat template 'default' is no chat template: "
    )


def test_no_prompt_is_encoded_with_it(folder: Path) -> None:
    """Each chat got 400, as if its messages were wrong."""
    in_settings(folder, BROKEN)
    with pytest.raises(ConfigError, match=r"^tokenizer = .*: line 3 of the chat_template 'default'"):
        PromptEncoder.load(str(folder))
