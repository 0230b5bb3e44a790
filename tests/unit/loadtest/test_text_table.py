"""A table is shown whole, however narrow the terminal: columns that do not fit follow below."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from loadtest.text_table import TextTable

TABLE = TextTable(
    "chats [slow] at 4 requests/s",
    ("contender", "answers", "hit rate", "mean TTFT", "p99 TTFT"),
    (
        ("expected_time", "175", "54 % [50, 60]", "483 ms [400, 500]", "2,627 ms [2,400, 2,900]"),
        ("round_robin", "175", "13 % [11, 15]", "983 ms [900, 1,000]", "5,627 ms [5,400, 5,900]"),
    ),
    "Of one repeat [bold]only[/].",
)


def printed(table: TextTable, width: int) -> str:
    file = io.StringIO()
    table.print_on(Console(file=file, width=width, color_system=None))
    return file.getvalue()


@pytest.mark.parametrize("width", [50, 64, 80, 160])
def test_no_cell_is_cut_and_no_line_is_too_long(width: int) -> None:
    lines = printed(TABLE, width).splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for cell in (TABLE.title, TABLE.note, *TABLE.columns, *sum(TABLE.rows, ())):
        assert cell in text


def test_names_are_repeated_beside_what_follows_below() -> None:
    assert printed(TABLE, 160).count("expected_time") == 1
    assert printed(TABLE, 60).count("expected_time") == 3


def test_prose_is_wrapped_beside_the_other_columns() -> None:
    prose = " ".join(["word"] * 40)
    text = printed(TextTable("knobs", ("policy", "knobs", "cells"), (("ours", prose, "45"),)), 90)
    assert text.count("word") == 40
    assert text.count("ours") == 1
