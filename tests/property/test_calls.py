"""Whatever the functions and whatever is drawn: calls that are read back are those that were asked for."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.messages import FinishReason, SamplingParams
from cache.tokenizer_decoder import TokenizerDecoder
from replica.output.detokenizer import Detokenizer
from router.limits import Limits
from router.openai_api.call_grammar import CallRules, arguments_of, calls_of
from router.openai_api.pieces import Piece
from router.openai_api.structure_verdict import judge
from router.openai_api.thoughts import ThoughtReader
from router.openai_api.tool_calls import HermesReader
from router.openai_api.tools import Tool
from tests.fakes.structures import at_random, begun, schema, tagged_tokenizer, tagged_vocabulary, walk
from tests.fakes.tokenizers import CALL, CHATML_TOKENS, TAG_TOKENS, with_bytes

_SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    },
    {
        "properties": {"at": {"$ref": "#/$defs/place"}, "days": {"type": "number", "exclusiveMinimum": 0}},
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {"place": {"enum": ["Ulm", "Genève", 'a "quoted" one']}},
    },
    {
        "type": "object",
        "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
        "properties": {"tree": {"$ref": "#/$defs/node"}},
        "required": ["tree"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 8}},
        "additionalProperties": False,
    },
    {},
]
_TOOLS = st.lists(st.tuples(st.sampled_from([None, *_SCHEMAS]), st.booleans()), min_size=1, max_size=4).map(
    lambda drawn: [
        Tool(name=f"f-{index}.x", parameters=parameters, is_strict=is_strict)
        for index, (parameters, is_strict) in enumerate(drawn)
    ]
)
_ANSWER = {
    "type": "object",
    "properties": {"x": {"type": "boolean"}},
    "required": ["x"],
    "additionalProperties": False,
}
_RULES = st.builds(CallRules, st.booleans(), st.booleans(), st.sampled_from([None, schema(_ANSWER)]))


def read(text: str) -> Piece:
    return HermesReader(new_id=lambda: "id").read(text, FinishReason.STOP)


# What a model may say before its first call, where calls are not forced: drawn at random it would never call.
_BEGINNINGS = st.sampled_from(["", "<tool_call>", "Let me see.\n<tool_call>\n", "a < b <tool_call"])


@given(_TOOLS, _RULES, _BEGINNINGS, st.sampled_from(sorted(TAG_TOKENS)), st.integers(0, 10**6))
def test_calls_are_of_functions_there_are_and_keep_to_their_schemas(
    tools: list[Tool], rules: CallRules, beginning: str, tags: str, seed: int
) -> None:
    """However the tokenizer has the tags of a call."""
    tokenizer, vocabulary = tagged_tokenizer(tags), tagged_vocabulary(tags)
    functions = [(tool.name, arguments_of(tool, "tools[0]", Limits())) for tool in tools]
    structure = calls_of(functions, rules)
    assert judge(structure) is None
    matcher, tokens = begun(structure, vocabulary=vocabulary), []
    if not rules.is_required and rules.answer is None:
        tokens = vocabulary.tokens.tokenize_str(beginning)
        for token_id in tokens:
            matcher.advance(token_id)
        assert matcher.failure is None
    drawn, is_whole = walk(matcher, at_random(seed, patience=60))
    if not is_whole:
        return
    text = tokenizer.decode(tokens + drawn, skip_special_tokens=True)  # type: ignore[attr-defined]
    found = read(text)
    if "<tool_call>" in text:
        assert found.calls
    by_name = {tool.name: tool for tool in tools}
    for call in found.calls:
        tool = by_name[call.name]
        parameters = (
            {"properties": {}, "additionalProperties": False} if tool.parameters is None else tool.parameters
        )
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict)
        jsonschema.validate(arguments, parameters)
        assert call.arguments in text  # as it was written
    if rules.is_single:
        assert len(found.calls) <= 1
    if rules.is_required:
        assert found.calls
        assert not found.text.strip()
    elif rules.answer is not None:
        assert bool(found.calls) is not bool(found.text.strip())
        if not found.calls:
            jsonschema.validate(json.loads(text), _ANSWER)
    assert "<tool_call>" not in found.text


@pytest.mark.parametrize("tags", sorted(set(TAG_TOKENS) - {"special"}))  # which no text has
@pytest.mark.parametrize("shape", ["bytes", "tiny", "llama legacy", "metaspace first", "unigram never"])
def test_thoughts_and_calls_are_found_however_the_tokenizer_has_their_tags(shape: str, tags: str) -> None:
    tokenizer = with_bytes(shape, (*CHATML_TOKENS, *TAG_TOKENS[tags]))
    prompt, said = (
        tokenizer.encode(text, add_special_tokens=False)
        for text in ("<|im_start|>he", f"<think>\nhm, he\n</think>\n\nhello {CALL}\n{CALL}")
    )
    at_most = SamplingParams(max_tokens=len(said) + 1)
    text = Detokenizer(
        TokenizerDecoder(tokenizer), at_most, frozenset(), max_tokens=len(said) + 1, prompt=prompt
    )
    reader, pieces = ThoughtReader(HermesReader()), []
    for token_id in said:
        text.push(token_id)
        pieces.append(reader.read(text.take(), None))
    text.end()
    pieces.append(reader.read(text.take(), FinishReason.STOP))
    assert "".join(piece.thought for piece in pieces) == "hm, he"
    assert "".join(piece.text for piece in pieces) == "hello"
    assert [call.name for piece in pieces for call in piece.calls] == ["weather", "weather"]
