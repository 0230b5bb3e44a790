"""Characters in GBNF are those that llama.cpp reads, whatever Lark and its expressions would make of them."""

from __future__ import annotations

import pytest

from cache.structure import Structure, StructureKind
from router.openai_api.gbnf import lark_of
from tests.fakes.structures import follows


def _taken(grammar: str, texts: list[str]) -> list[str]:
    structure = Structure(StructureKind.GRAMMAR, lark_of(grammar))
    return [text for text in texts if follows(structure, text)]


@pytest.mark.parametrize(
    ("body", "texts", "others"),
    [
        (".", ["a", "\n", "\r", "\u2028", "é", "😀", "\0"], ["", "ab"]),
        ('"a" .* "b"', ["ab", "a\n\nb"], ["a"]),
        (r'"\U0001F600"', ["😀"], ["\U0001f601"]),
        (r"[\U0001F600-\U0001F64F]", ["😀"], ["a"]),
        (r"[b-\U0010ffff]", ["b", "😀"], ["a"]),
        (r'"\u0041\u00e9\u003c\x3e"', ["Aé<>"], []),
        (r"[\u0041\u00e9\x42]", ["A", "é", "B"], ["4", "u", "0"]),
        (r'"\xe9"', ["é"], []),  # a character, as in llama.cpp, and no byte
        (r'"\x00\u0000"', ["\0\0"], []),
        (r"[^\x00-\x1f]", ["a", "é"], ["\n", "\0"]),
        ("[a&&b]", ["a", "b", "&"], []),
        ("[a-z&&x-y]", ["a", "&"], ["-"]),
        ("[a~~b]", ["a", "b", "~"], []),
        ("[a||b]", ["a", "b", "|"], []),
        ("[+--]", ["+", ",", "-"], ["."]),  # a range that ends with a dash
        ("[--a]", ["-", "A", "a"], ["b"]),
        ("[a-]", ["a", "-"], ["b"]),
        ("[-a]", ["a", "-"], ["b"]),
        (r"[a\-z]", ["a", "-", "z"], ["b"]),
        ("[^^]", ["a"], ["^"]),
        ("[a^]", ["a", "^"], []),
        ("[[a]", ["[", "a"], []),
        (r"[\[\]\\\"/]", ["[", "]", "\\", '"', "/"], ["a"]),
        ("[(){}*+?|.$# ]", list("(){}*+?|.$# "), ["a"]),
        ("[\n]", ["\n"], ["n"]),
        (r'"\[\]\-\\\"\t\r\n"', ['[]-\\"\t\r\n'], []),
        ('"a\nb\t\x7f/"', ["a\nb\t\x7f/"], []),
        ('"a" [] "b" [^]', ["ab"], ["a", "axb"]),
    ],
)
def test_a_character_is_what_llama_cpp_reads(body: str, texts: list[str], others: list[str]) -> None:
    assert _taken(f"root ::= {body}", texts + others) == texts
    assert _taken(f"root ::= x\nx ::= {body}", texts + others) == texts


@pytest.mark.parametrize(
    "body",
    [
        *(r'"\u12"', r'"\U0001F60"', r'"\xg0"', r'"\U00110000"', r'"\ud83d\ude00"', r'"\d"', '"a', '"\\'),
        *(r"[\u12]", r"[\ud800]", "[b-a]", "[a--b]", r"[\w]", "[a", "[a-", "["),
    ],
)
def test_what_is_no_character_is_refused(body: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        lark_of(f"root ::= {body}")
