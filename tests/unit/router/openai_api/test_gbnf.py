"""Characters in GBNF are those that llama.cpp reads, whatever Lark and its expressions would make of them."""

from __future__ import annotations

import pytest

from cache.structure import Structure, StructureKind
from router.openai_api import gbnf_lexemes
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
        ('("a"*)? "b"', ["b", "aab"], ["a"]),
        ('("a"{2}){3}', ["aaaaaa"], ["", "aaa"]),
        ('"a"{0} "b" "c"{0,0}', ["b"], ["ab", "bc"]),
    ],
)
def test_a_character_is_what_llama_cpp_reads(body: str, texts: list[str], others: list[str]) -> None:
    assert _taken(f"root ::= {body}", texts + others) == texts
    assert _taken(f"root ::= x\nx ::= {body}", texts + others) == texts


@pytest.mark.parametrize(
    "body",
    [
        *(r'"\u12"', r'"\U0001F60"', r'"\xg0"', r'"\U00110000"', r'"\ud83d\ude00"', r'"\d"', '"a', '"\\'),
        *(r'"\udc00"', r"[\u12]", r"[\ud800]", "[b-a]", "[a--b]", r"[\w]", "[a", "[a-", "["),
    ],
)
def test_what_is_no_character_is_refused(body: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        lark_of(f"root ::= {body}")


ARITHMETIC = """
root  ::= (expr "=" ws term "\\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \\t\\n]*
"""  # llama.cpp's grammars/arithmetic.gbnf


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (ARITHMETIC, ["x=1\n", "x = (1 +2 )\n\n", "a+b=c\nx=1\n"]),
        ('root ::= w "a"\nw ::= [a-z]*', ["a", "ba", "baa"]),
        ('root ::= "ab" | "a" "bc"', ["ab", "abc"]),
        ('root ::= "<think>" any "</think>" "ok"\nany ::= .*', ["<think>a</th</think>ok"]),
        ('root ::= x ["é-ê"]\nx ::= "a" ("ë" "b")?', ["aé", "aëbê"]),  # bytes that begin alike
        ('root ::= w "!"? "a"\nw ::= [a-z]*', ["ba", "b!a"]),  # behind what may be nothing
        ('root ::= "ab" "c" | "a" "bc" "d"', ["abc", "abcd"]),  # behind the last character of what is split
        ('root ::= "abc" | "ab" "cd"', ["abc", "abcd"]),  # and behind the others
        ('root ::= "ab"+ | "a" "bc"', ["abab", "abc"]),  # all of what is split is repeated
        ('root ::= w "é"\nw ::= [^\\x7f]*', ["aé"]),  # all that are not ASCII are one
        ('root ::= y x "a"\nx ::= [a-z]*\ny ::= "<" x ">"', ["<b>ca"]),  # and what is made of it
    ],
)
def test_what_a_rule_took_is_given_back_to_what_follows(grammar: str, texts: list[str]) -> None:
    assert _taken(grammar, texts) == texts


def test_what_nothing_that_follows_can_go_on_is_one_lexeme() -> None:
    """A mask over a model's vocabulary takes a hundredth of the time."""
    lark = lark_of(
        'root ::= text (":" text)*\ntext ::= "<" ("!" . | [^!>])* ">" space\nspace ::= [ \\n]{0,9}'
    )
    assert "\nTEXT: " in lark
    assert "\ntext: " in lark_of('root ::= text "."\ntext ::= .*')
    assert "\nNUM: " in lark_of('root ::= "(" (num | root) ")"\nnum ::= [0-9]+')  # beside what has no end


def test_of_many_texts_only_what_they_have_in_common_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand sentences to choose from are a lexeme each."""
    monkeypatch.setattr(gbnf_lexemes, "MAX_STEPS", 2000)
    texts = [f'"{number:02} {"x" * 500}"' for number in range(10)]
    lark = lark_of(f"root ::= ({' | '.join(texts)}) [.]")
    assert [text for text in texts if text not in lark] == []


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= r0 "a"\n' + "".join(f"r{n} ::= r{n + 1}\n" for n in range(2000)) + "r2000 ::= [a-z]*",
        'root ::= r0 "a"\n' + "".join(f"r{n} ::= r{n + 1} r{n + 1}\n" for n in range(40)) + "r40 ::= [a-z]?",
    ],
    ids=["deep", "doubled"],
)
def test_where_it_takes_too_long_to_know_nothing_is_a_lexeme(grammar: str) -> None:
    assert "\nr0: " in lark_of(grammar)
