"""Tokens of an earlier attempt, taken together, end an answer where and why they end it one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import StructureRefused
from cache.messages import FinishReason, SamplingParams
from replica.engine.taken_tokens import take_token, take_tokens
from replica.output import detokenizer as module
from replica.output.detokenizer import Detokenizer
from replica.structures.compiler import compile_structure
from tests.fakes.engine import TokenizersDecoder
from tests.fakes.structures import END, allowed, regex, schema, tiny_vocabulary

DECODER = TokenizersDecoder()
STRUCTURES = [
    None,
    regex("[a-c ]{2,30}"),
    regex("(yes|no), (and|or) more"),
    schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
]
Outcome = tuple[FinishReason | str | None, str]


def outcome(request: Any, tokens: list[int], *, together: bool) -> Outcome:
    """Why it has ended, and its text, which goes on nowhere where it was refused."""
    reason: FinishReason | None = None
    try:
        if together:
            reason = take_tokens(request, tokens)
        else:
            for token_id in tokens:
                if (reason := take_token(request, token_id)) is not None:
                    break
    except StructureRefused as error:
        return str(error), ""
    return reason, request.detokenizer.take()


@given(st.data(), st.sampled_from(STRUCTURES), st.integers(1, 5))
@settings(max_examples=200)
def test_together_they_end_it_as_one_by_one(data: st.DataObject, structure: Any, chunk_tokens: int) -> None:
    """Allowed tokens, now and then any, with stop strings, stop ids, ends of a turn and a length."""
    compiled = None if structure is None else compile_structure(tiny_vocabulary(), structure)
    guide = None if compiled is None else compiled.begun(0)
    tokens: list[int] = []
    for _ in range(data.draw(st.integers(0, 25))):
        may_come = [*range(5, 400)] if guide is None or guide.is_over else allowed(guide)
        is_any = data.draw(st.integers(0, 30)) == 30
        token_id = data.draw(st.integers(0, 400) if is_any or not may_come else st.sampled_from(may_come))
        tokens.append(token_id)
        if guide is not None:
            guide.advance(token_id)
    params = SamplingParams(
        max_tokens=max(1, len(tokens) + data.draw(st.integers(0, 2))),
        min_tokens=data.draw(st.integers(0, 6)),
        stop=tuple(data.draw(st.lists(st.sampled_from(["a", "b", " ", "e", '"', "ab"]), max_size=2))),
        stop_token_ids=tuple(data.draw(st.lists(st.sampled_from(tokens or [9]), max_size=1))),
        ignore_eos=data.draw(st.booleans()),
    )

    def request() -> Any:
        return SimpleNamespace(
            structure=None if compiled is None else compiled.begun(params.min_tokens),
            detokenizer=Detokenizer(DECODER, params, frozenset({0, END}), max_tokens=params.max_tokens),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_TOKENS", chunk_tokens)
        together = outcome(request(), tokens, together=True)
    assert together == outcome(request(), tokens, together=False)
