"""However a character is written in GBNF, between quotes or in brackets, it stands for itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache.structure import Structure, StructureKind
from router.openai_api.gbnf import lark_of
from tests.fakes.structures import follows

_CHARS = st.one_of(
    st.sampled_from("ab-^]&|~[\\/\"'.#\n\t\x7f\0é中😀"), st.characters(exclude_categories=["Cs"])
)


def _spellings(char: str) -> list[str]:
    """What llama.cpp reads as this character: its numbers and its escape, or itself."""
    code = ord(char)
    spelled = [f"\\U{code:08X}"]
    if code <= 0xFFFF:
        spelled.append(f"\\u{code:04x}")
    if code <= 0xFF:
        spelled.append(f"\\x{code:02x}")
    names = {"\t": "t", "\r": "r", "\n": "n", **{char: char for char in '\\"[]-'}}
    return [*spelled, f"\\{names[char]}" if char in names else char]


@given(st.data(), st.lists(_CHARS, max_size=6))
def test_a_literal_is_its_characters(data: st.DataObject, chars: list[str]) -> None:
    written = "".join([data.draw(st.sampled_from(_spellings(char))) for char in chars])
    structure = Structure(StructureKind.GRAMMAR, lark_of(f'root ::= "<{written}>"'))
    text = "".join(chars)
    assert follows(structure, f"<{text}>")
    assert not follows(structure, f"<{text}x>")


@given(
    st.data(),
    st.lists(st.tuples(_CHARS, st.none() | _CHARS), min_size=1, max_size=5),
    st.booleans(),
    st.lists(_CHARS, max_size=4),
)
def test_a_class_is_its_characters_and_ranges(
    data: st.DataObject, parts: list[tuple[str, str | None]], is_other: bool, others: list[str]
) -> None:
    ranges = [(char, char) if last is None else tuple(sorted((char, last))) for char, last in parts]
    written = "^" * is_other
    for first, last in ranges:
        # At the beginning a caret is no character.
        spellings = [[each for each in _spellings(char) if each != "^"] for char in (first, last)]
        spelled = [data.draw(st.sampled_from(each)) for each in spellings]
        written += spelled[0] if first == last else "-".join(spelled)
    structure = Structure(StructureKind.GRAMMAR, lark_of(f"root ::= [{written}]"))
    for char in [*others, *(char for each in ranges for char in each)]:
        is_in = any(first <= char <= last for first, last in ranges)
        assert follows(structure, char) is (is_in is not is_other)
