"""The tokenizer benchmark on one small conversation: its rows, its table, what it refuses."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import tokenization
from tests.fakes.tokenizers import a_tokenizer


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "CONVERSATIONS", ((200, 2),))


@pytest.mark.usefixtures("small")
def test_a_row_has_what_was_measured() -> None:
    [row] = tokenization.measure(str(tokenization.TINY), repeats=2)
    assert row.prompt_tokens > 200
    assert row.messages == 5
    assert row.new_tokens > 2 * tokenization.NEW_TOKENS * 0.8
    assert min(row.render_ms, row.whole_ms, row.first_ms, row.next_turn_ms, row.again_ms) > 0
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(tokenization.table([row]))
    assert str(row.prompt_tokens) in console.export_text()


def test_texts_never_repeat() -> None:
    writer = tokenization.Writer("abc " * 100, 3.0)
    texts = [writer.text(50) for _ in range(500)]
    assert len(set(texts)) == 500
    assert all(150 <= len(text) < 160 for text in texts)


@pytest.mark.usefixtures("small")
def test_a_tokenizer_without_segments_has_nothing_to_compare(tmp_path: Path) -> None:
    a_tokenizer("bytes", ()).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="nothing to compare"):
        tokenization.measure(str(tmp_path), repeats=1)
