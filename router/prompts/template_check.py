"""Whether a tokenizer's chat templates are templates at all, found before anybody's chat is rendered.

One that does not compile refuses every chat, in words that blame its messages. What a template does with
messages is not looked at here. Knows tokenizers and their files; knows neither chats nor HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

TEMPLATE = "chat_template.jinja"
OTHER_TEMPLATES = "additional_chat_templates"  # a file each, beside it
SETTINGS = "tokenizer_config.json"  # holds all of them where there is no file of that kind

_ANY_CHAT = [{"role": "user", "content": "Hello"}]


def template_fault(tokenizer: Any, folder: Path | None) -> str | None:
    """What keeps a chat template from being compiled, with its file and line; None where all of them can be.

    tokenizer: a transformers tokenizer. folder: that it is from; None = one that is not here.
    """
    found = tokenizer.chat_template
    templates = found if isinstance(found, Mapping) else {"default": found}
    for name, template in templates.items():
        if template and (error := _syntax_error(tokenizer, template)) is not None:
            at = _place(name, error.lineno, folder)
            return f"{at} is no chat template: {error.message}; fetch its file again, or mend it"
    return None


def _syntax_error(tokenizer: Any, template: str) -> jinja2.TemplateSyntaxError | None:
    """Found by rendering a chat, since only transformers knows what it compiles templates with."""
    try:
        tokenizer.apply_chat_template(_ANY_CHAT, chat_template=template, tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        return error
    except Exception:  # it compiles, and wants another chat
        return None
    return None


def _place(name: str, line: int, folder: Path | None) -> str:
    if folder is None:
        return f"line {line} of its chat template {name!r}"
    file = TEMPLATE if name == "default" else f"{OTHER_TEMPLATES}/{name}.jinja"
    if (folder / file).is_file():
        return f"line {line} of {file}"
    return f"line {line} of the chat_template {name!r} in {SETTINGS}"
