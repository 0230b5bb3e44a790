"""`ask`: its stopwatch and its words, on a simulated engine in virtual time."""

from __future__ import annotations

import shutil
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from cache.types import pack_tokens
from replica.__main__ import main
from replica.ask import Answer, ask, render, verdict
from replica.config import SimConfig
from replica.errors import ForwardFailed
from replica.models import tiny_model
from replica.output import sample_table
from tests.fakes.engine import TokenizersDecoder, VirtualClock, make_request, sim_core

DECODER = TokenizersDecoder()


def questions(clock: VirtualClock, **sim: float) -> list[Answer]:
    settings = SimConfig(vocab_size=DECODER.tokenizer.get_vocab_size(), **sim)  # type: ignore[arg-type]
    core = sim_core(1024, clock=clock, decoder=DECODER, sim=settings)
    answers = []
    for index, question in enumerate(sample_table.questions()[:2]):
        prompt = pack_tokens(DECODER.encode(sample_table.prompt(question)))
        request = make_request(f"q{index}", prompt, max_tokens=8)
        answers.append(ask(core, request, question.text, clock))
    return answers


def test_the_second_question_is_faster_because_of_the_table() -> None:
    first, second = questions(VirtualClock())
    assert (first.cached_tokens, second.cached_tokens > 0.95 * second.prompt_tokens) == (0, True)
    # Per-token time dominates: the miss pays for every token, the hit for its own few.
    assert first.ttft_s > 4 * second.ttft_s > 0
    assert first.text
    assert second.text


def test_time_to_first_token_is_not_time_to_the_last() -> None:
    """Eight tokens of one second each: the first comes after the prefill's steps."""
    clock = VirtualClock()
    first, second = questions(clock, base_s=1.0, per_token_s=0.0, per_attention_s=0.0, per_sequence_s=0.0)
    prefill_steps = -(-first.prompt_tokens // 512)
    assert (first.ttft_s, second.ttft_s) == (prefill_steps, 1.0)
    assert clock.now_s == prefill_steps + 7 + 8


def test_an_error_is_raised_not_shown_as_an_answer() -> None:
    with pytest.raises(ForwardFailed):
        questions(VirtualClock(), raise_every_steps=2)


def test_output_shows_both_times_and_the_gain() -> None:
    answers = [
        Answer("What is the age?", 2000, 0, 0.5, "[bold] nonsense\x1b[31m\n\twith brackets"),
        Answer("What is the id?", 2000, 1952, 0.05, "x" * 200),
    ]
    console = Console(file=StringIO(), width=160)
    console.print(render(answers))
    console.print(verdict(*answers))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for expected in ("500.0 ms", "50.0 ms", "1952", "[bold] nonsense", "98%", "10.0 times as fast"):
        assert expected in shown
    assert "\x1b" not in shown


def test_errors_are_one_line_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ask", "--model", "/no/such/folder"]) == 1
    assert "error: model = '/no/such/folder': this folder does not exist" in capsys.readouterr().err


def test_a_broken_chat_template_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shutil.copytree(tiny_model.ensure_built(), tmp_path / "model")
    (model / "chat_template.jinja").write_text("\n{% for message in messages %}")
    assert main(["ask", "--model", str(model), "--device", "cpu"]) == 1
    said = f"error: model = '{model}': line 2 of its chat template cannot be used: Unexpected end of template"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["ask", "--max-tokens", "0"], ["answer"], []])
def test_wrong_usage_ends_with_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["ask", "--help"])
    shown = capsys.readouterr().out
    assert "examples:" in shown
    assert "python -m replica ask --model" in shown
