"""The tokenizer of the model to be served, tried before anything starts."""

from __future__ import annotations

from cache.fingerprint import ChatTemplate
from replica.models.model_source import ModelRefused, ResolvedModel
from replica.models.tokenizer_source import load_tokenizer
from router.prompts.template_check import template_fault


def checked_template(model: ResolvedModel) -> ChatTemplate:
    """Its chat template, or several; None if it has none. Takes seconds.

    Raises ModelRefused for a tokenizer that cannot be loaded, and for a template that cannot be compiled.
    """
    tokenizer = load_tokenizer(model)
    fault = template_fault(tokenizer, model.folder)
    if fault is not None:
        raise ModelRefused(model.source, fault)
    template: ChatTemplate = tokenizer.chat_template
    return template
