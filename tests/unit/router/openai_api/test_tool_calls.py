"""Calls of tools are found in text however it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.messages import FinishReason
from router.openai_api.pieces import Piece, ToolCall
from router.openai_api.tool_calls import (
    CLOSE,
    OPEN,
    HermesReader,
    ToolFormat,
    format_of,
    renders_tools,
)
from tests.fakes.tokenizers import CALL, CHATML, HERMES


def numbered(*, is_held: bool = False) -> HermesReader:
    numbers = iter(range(100))
    return HermesReader(is_held=is_held, new_id=lambda: f"call_{next(numbers)}")


def read(reader: HermesReader, parts: Sequence[str], ending: FinishReason = FinishReason.STOP) -> Piece:
    """Everything that came out, put together."""
    pieces = [
        reader.read(part, ending if index + 1 == len(parts) else None) for index, part in enumerate(parts)
    ]
    return Piece("".join(piece.text for piece in pieces), tuple(call for p in pieces for call in p.calls))


CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("just text", "just text", []),
    ("a < b and <tool", "a < b and <tool", []),
    ("ends in space \n", "ends in space \n", []),
    (CALL, "", [("weather", '{"place": "Zürich"}')]),
    (f"Let me see.\n{CALL}\n", "Let me see.", [("weather", '{"place": "Zürich"}')]),
    (f"{CALL}\n{CALL}", "", [("weather", '{"place": "Zürich"}')] * 2),
    (f"A {CALL} B", "A B", [("weather", '{"place": "Zürich"}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),  # it stopped before the tag
    (
        '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
        "",
        [("f", '{"x": "</tool_call>"}')],
    ),
    (r'<tool_call>{"name": "f", "arguments": {"x": "\ud800"}}</tool_call>', "", [("f", r'{"x": "\ud800"}')]),
    # Arguments are passed on as they are written.
    (
        '<tool_call>{ "arguments" : {"x": 1.50000000000000000001,"y":1e999} , "name":"f" }</tool_call>',
        "",
        [("f", '{"x": 1.50000000000000000001,"y":1e999}')],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {"n": ' + "9" * 5000 + "}}</tool_call>",
        "",
        [("f", '{"n": ' + "9" * 5000 + "}")],
    ),
    # A tag that begins no call hides none that follows.
    (
        f"<think>\nA `<tool_call>` it is.\n</think>\n\n{CALL}",
        "<think>\nA `<tool_call>` it is.\n</think>",
        [("weather", '{"place": "Zürich"}')],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {\n<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {',
        [("f", "{}")],
    ),
    ("<tool_call> or <tool_call>x</tool_call> \n<tool_call>", None, []),
    (f"{OPEN} {OPEN}{CALL}", f"{OPEN} {OPEN}", [("weather", '{"place": "Zürich"}')]),
    # What is no call is text, to the last character.
    ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
    ("<tool_call>{}</tool_call>", None, []),
    ('<tool_call>{"name": "f"} x</tool_call>', None, []),
    ('<tool_call>{"name": "f",}</tool_call>', None, []),
    ('<tool_call>{"name" "f"}</tool_call>', None, []),
    ('<tool_call>{1: "f"}</tool_call>', None, []),
    ("\n <tool_call>[]</tool_call> x", "\n <tool_call>[]</tool_call> x", []),
    ('<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
    ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', None, []),
    (r'<tool_call>{"name": "\ud800"}</tool_call>', None, []),
    ('<tool_call>{"name": "f", "argum', None, []),
    ('<tool_call>{"name": "f", "arguments": {"x": "</tool_call>', None, []),
]  # type: ignore[list-item]


@pytest.mark.parametrize(("written", "text", "calls"), CASES)
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_are_found_however_the_text_is_cut(
    written: str, text: str | None, calls: list[tuple[str, str]], size: int
) -> None:
    parts = [written[at : at + size] for at in range(0, len(written), size)]
    found = read(numbered(), parts)
    assert found.text == (written if text is None else text)
    assert [(call.name, call.arguments) for call in found.calls] == calls


fragments = st.sampled_from(
    [
        OPEN,
        CLOSE,
        CALL,
        " ",
        "\n",
        "<",
        "<tool",
        "x",
        '{"name": "f"}',
        '{"name": "f", "arguments": {"a": "',
        '"}}',
    ]
)


@given(st.lists(fragments, max_size=12), st.data())
def test_every_cut_gives_the_same(parts: list[str], data: st.DataObject) -> None:
    written = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(written)), max_size=8)))
    pieces = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    assert read(numbered(), pieces) == read(numbered(), [written])


@given(st.lists(fragments, max_size=12))
def test_text_without_a_tag_comes_out_as_it_went_in(parts: list[str]) -> None:
    written = "".join(parts).replace(OPEN, "")
    assert read(numbered(), [*written, ""]) == Piece(written)


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    reader = numbered()
    given_out = [reader.read(part, None).text for part in ("Hello", " ", "world", " <", "b", "<tool_", "x")]
    assert given_out == ["Hello", "", " world", "", " <b", "", "<tool_x"]


def test_one_call_only_if_so_asked() -> None:
    reader = HermesReader(is_parallel=False, new_id=lambda: "call_x")
    found = read(reader, ["a", CALL, "\n", CALL, "b"])
    assert found == Piece("a", (ToolCall("call_x", "weather", '{"place": "Zürich"}'),))


ARGUMENTS = r'{ "place" : "Zü\"rich</tool_call>", "days": [1.5e3, {"a": null}], "wet": false }'
BEGUN = '<tool_call>\n{"name" : "weather", "arguments": '


@given(st.integers(len(BEGUN) + 1, len(BEGUN + ARGUMENTS) + len("}\n" + CLOSE)), st.integers(1, 50))
def test_an_answer_cut_off_in_a_call_has_the_arguments_so_far(length: int, size: int) -> None:
    """As the API has it: clients took the tag and what followed for an answer."""
    written = f"Let me see.\n{CALL}\n{BEGUN}{ARGUMENTS}}}\n{CLOSE}"
    written = written[: written.index(BEGUN) + length]
    parts = [written[at : at + size] for at in range(0, len(written), size)]
    found = read(numbered(), parts, FinishReason.LENGTH)
    so_far = (BEGUN + ARGUMENTS)[len(BEGUN) : length]
    assert found.text == "Let me see."
    assert [(call.name, call.arguments) for call in found.calls] == [
        ("weather", '{"place": "Zürich"}'),
        ("weather", so_far),
    ]


@pytest.mark.parametrize(
    "written",
    [
        # Nobody can tell that these become calls.
        "a <tool_ca",
        "a <tool_call>",
        '<tool_call>{"name": "weath',
        '<tool_call>{"name": "weather", "arguments": ',
        # These do not, however they go on.
        '<tool_call>{"name": "weather", "arguments": [1, ',
        '<tool_call>{"name": "weather", "arguments": {place',
        '<tool_call>{"name": "weather", "arguments": {"x": NaN, ',
        '<tool_call>{"name": "weather", "arguments": {"x": 1}, ',
        '<tool_call>{"name": "weather", "arguments": {"x": 1}} and',
        '<tool_call>{"name": "weather", "arguments": {"x": 1 and so on',
        '<tool_call>{"name": "weather", "arguments": {"x": [1} and so on',
        '<tool_call>{"name": "weather", "arguments": {"x": 1</tool_ca',
        '<tool_call>{"name": "", "arguments": {"x": ',
        r'<tool_call>{"name": "\ud800", "arguments": {"x": ',
        r'<tool_call>{"name": "\x", "arguments": {"x": ',
        '<tool_call>{"name": "weather", "arguments": ' + '{"x": ' * 10_000,
    ],
)
def test_what_is_cut_off_and_begins_no_call_is_text(written: str) -> None:
    assert read(numbered(), [written], FinishReason.LENGTH) == Piece(written)


def test_what_ends_by_itself_within_a_call_is_text() -> None:
    """Nothing cut it off: it is a call gone wrong."""
    written = CALL.removesuffix(f"}}{CLOSE}")[:-3]
    assert read(numbered(), [written]) == Piece(written)


LOOP = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
TAUGHT = {  # what templates say of calls, as their authors quote it
    "qwen": r"""{{- "in <tool_call></tool_call> tags:\n<tool_call>\n{\"name\": <name>}\n</tool_call>" }}""",
    "qwen's calls alone": r"""{{- '\n<tool_call>\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}""",
    "hermes": """{{- "<tool_call>\n" }}\n{{- '{"arguments": <args-dict>, "name": <function-name>}\n' }}""",
    "a mapping": "<tool_call>{{ {'name': call.name, 'arguments': call.arguments} | tojson }}</tool_call>",
    "the call itself": "{{ '<tool_call>' + (call | tojson) + '</tool_call>' }}",
}
NOT_READ = {
    "qwen3 coder": (
        r"{{- 'only reply so:\n\n<tool_call>\n<function=example>\n<parameter=x>\nvalue\n</parameter>' }}"
        r"{{- '<tool_call>\n<function=' + call.name + '>\n<parameter=' + name + '>\n' + (x | tojson) }}"
    ),
    "glm": (
        "<tool_call>{function-name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
        "{{ '\n<tool_call>' + call['name'] }}{% for k, v in call['arguments'].items() %}<arg_key>{{ k }}"
        "</arg_key><arg_value>{{ v | tojson }}</arg_value>{% endfor %}</tool_call>"
    ),
    "no format": "<tool_call>",
}


@pytest.mark.parametrize("lines", TAUGHT.values(), ids=TAUGHT.keys())
def test_json_in_the_tag_is_read_however_a_template_quotes_it(lines: str) -> None:
    assert format_of(LOOP + lines) is ToolFormat.HERMES


@pytest.mark.parametrize("lines", NOT_READ.values(), ids=NOT_READ.keys())
def test_another_format_in_the_same_tag_is_none_that_is_known(lines: str) -> None:
    """Calls of Qwen3-Coder and GLM stand in this tag, too: `tools` was taken, and no call was ever read."""
    assert renders_tools(LOOP + lines)
    assert format_of(LOOP + lines) is None


def test_templates_tell_their_format() -> None:
    assert format_of(HERMES) is ToolFormat.HERMES
    assert format_of(CHATML) is format_of(None) is None
    assert format_of("{% for tool in tools %}{{ tool }}{% endfor %}") is None
    assert renders_tools(HERMES)
    assert not renders_tools(CHATML)
    assert not renders_tools(None)


@given(
    st.lists(st.sampled_from([CALL, f"{BEGUN}{ARGUMENTS}}}\n{CLOSE}"]), max_size=3),
    st.sampled_from(["", "Let me see.\n", "a < b "]),
    st.integers(0, 400),
    st.integers(1, 60),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_held_calls_come_as_they_are_written(
    written_calls: list[str], lead: str, length: int, size: int, ending: FinishReason
) -> None:
    """Put together they are what others are that come whole, wherever the answer ends."""
    written = (lead + "\n".join(written_calls))[:length]
    parts = [written[at : at + size] for at in range(0, len(written), size)] or [""]
    reader, texts, calls = numbered(is_held=True), "", []
    for index, part in enumerate(parts):
        piece = reader.read(part, ending if index + 1 == len(parts) else None)
        texts += piece.text
        if piece.more:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + piece.more)
        calls += piece.calls
    # Nothing but calls begins with a tag there, so what is cut off within one is a call whatever ended it.
    whole = read(numbered(), [written], FinishReason.LENGTH)
    assert (texts, calls) == (whole.text, list(whole.calls))


def test_a_held_calls_arguments_do_not_wait_for_its_end() -> None:
    reader = numbered(is_held=True)
    parts = [
        "<tool_",
        'call>{"name": "f", "argu',
        'ments": {',
        '"x": "}',
        '\\""',
        "}",
        "}",
        "</tool_call>",
        " ",
    ]
    pieces = [reader.read(part, None) for part in parts]
    assert pieces[2] == Piece("", (ToolCall("call_0", "f", "{"),))
    assert [piece.more for piece in pieces] == ["", "", "", '"x": "}', '\\""', "}", "", "", ""]
    assert reader.read("", FinishReason.STOP) == Piece("")


def test_one_held_call_only_if_so_asked() -> None:
    reader = HermesReader(is_parallel=False, is_held=True, new_id=lambda: "call_x")
    piece = reader.read(f"{CALL}{CALL}b", FinishReason.STOP)
    assert piece == Piece("", (ToolCall("call_x", "weather", '{"place": "Zürich"}'),))
