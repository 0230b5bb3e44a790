"""A model folder's tokenizer, loaded; which of its files is damaged, where it cannot be.

transformers tells a damaged file by the error of whoever read it, without its name. Knows files and the
loader; knows neither prompts nor what templates make of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cache import heap
from replica.models.model_source import ModelRefused, ResolvedModel, described, read_json

VOCABULARY = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
OBJECTS = (VOCABULARY, SETTINGS, "special_tokens_map.json", "added_tokens.json")
TEMPLATES = ("chat_template.jinja", "additional_chat_templates/*.jinja")
WAY_OUT = "fetch it again, or mend it"


def load_tokenizer(resolved: ResolvedModel) -> Any:
    """The model's own tokenizer (a transformers `PreTrainedTokenizerBase`). Raises ModelRefused."""
    _check_files(resolved)
    with heap.without_collections():
        from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(resolved.folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises a bare one for a file that a later version wrote
        at = f" from {VOCABULARY}" if _is_misshapen(resolved.folder / VOCABULARY) else ""
        raise ModelRefused(
            resolved.source, f"its tokenizer cannot be loaded{at}: {described(error)}"
        ) from error
    # Without tokenizer files some families get an empty one, which would read every prompt as nothing.
    if set(tokenizer.encode("any text", add_special_tokens=False)) <= set(tokenizer.all_special_ids):
        raise ModelRefused(
            resolved.source, "its tokenizer knows no words: are the tokenizer's files missing?"
        )
    return tokenizer


def _check_files(resolved: ResolvedModel) -> None:
    """Raises ModelRefused for the first of the tokenizer's files that is not what it should be."""
    model, folder = resolved.source, resolved.folder
    for name in OBJECTS:
        if not (folder / name).exists():
            continue
        try:
            found = read_json(model, folder / name)
        except ModelRefused as error:
            raise ModelRefused(model, f"{error.accepted}; {WAY_OUT}") from error
        if name == SETTINGS and not _are_templates(found.get("chat_template")):
            what = "neither a text nor a list of templates with a name each"
            raise ModelRefused(model, f"the chat_template of {name} is {what}; {WAY_OUT}")
    for path in sorted(each for pattern in TEMPLATES for each in folder.glob(pattern)):
        try:
            path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            shown = path.relative_to(folder)
            raise ModelRefused(model, f"{shown} cannot be read: {described(error)}; {WAY_OUT}") from error


def _are_templates(value: object) -> bool:
    if isinstance(value, list):
        return all(
            isinstance(each, dict)
            and isinstance(each.get("name"), str)
            and isinstance(each.get("template"), str)
            for each in value
        )
    return value is None or isinstance(value, str)


def _is_misshapen(vocabulary: Path) -> bool:
    """Whether it is there, and none that the tokenizers library takes."""
    if not vocabulary.exists():
        return False
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(vocabulary))
    except Exception:  # a bare one, whatever it is
        return True
    return False
