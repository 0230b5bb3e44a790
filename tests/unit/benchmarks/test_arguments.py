"""Arguments that make no sense: the option and what it takes in one line, status 2, nothing measured."""

from __future__ import annotations

import importlib

import pytest

from benchmarks import several_answers
from cache.errors import PromptTooLong, ServingError
from replica.models.model_source import NotEnoughMemory


def said(module: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(f"benchmarks.{module}").main(arguments)
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("module", "arguments", "told"),
    [
        ("router", "--replicas x", "--replicas: 'x' is not a whole number of at least 1"),
        ("router", "--replicas 0", "--replicas: 0 is not at least 1"),
        ("router", "--prompts foo", "--prompts: invalid choice: 'foo' (choose from '1k', '8k', '32k')"),
        ("router", "--parts nothing", "--parts: invalid choice: 'nothing'"),
        ("router", "--blocks 1 --replicas 1 --prompts 1k --parts index", "--blocks: 1 is not at least 33"),
        ("router", "--blocks 100 --replicas 8 --quick", "--blocks: 100 is not at least 801"),
        ("router", "--quick --blocks 20 --parts stall", "--blocks: 20 is not at least 6,177"),
        ("router", "--replicas 2000", "--blocks: 1,000,000 is not at least 1,152,033"),
        ("router", "--json /", "--json: / cannot be written"),
        ("engine", "--pairs x", "--pairs: 'x' is not a whole number"),
        ("engine", "--resume /", "--resume: / cannot be written"),
        ("engine", "--json /nowhere/out.json", "--json: /nowhere/out.json cannot be written"),
        ("engine", "--markdown /nowhere/out.md", "--markdown: /nowhere/out.md cannot be written"),
        ("tokenization", "--repeats 0", "--repeats: 0 is not at least 1"),
        ("tokenization", "--json /", "--json: / cannot be written"),
        ("tokenization", "--tokenizer /nowhere", "'/nowhere': no such folder"),
        ("several_answers", "--n 0", "--n: 0 is not at least 1"),
        ("several_answers", "--prompt-tokens -1", "--prompt-tokens: -1 is not at least 1"),
        ("several_answers", "--repeats 0", "--repeats: 0 is not at least 1"),
        ("step_profile", "--only foo", "--only: no shape has one of these; there are: decode, batch 1"),
        ("step_profile", "--json /", "--json: / cannot be written"),
        ("cache.__main__", "--cache-tokens 5", "--block-size: 16 is not from 1 to the 5 tokens of memory"),
        (
            "cache.__main__",
            "--cache-tokens 16 --traffic chats --requests 5",
            "--cache-tokens: 16 is not at least",
        ),
        ("cache.__main__", "--json /", "--json: / cannot be written"),
        ("gpu.__main__", "--limit-s x", "--limit-s: 'x' is not a number of at least 0"),
        ("gpu.__main__", "--limit-s nan", "--limit-s: 'nan' is not a number"),
        ("overhead.__main__", "--step-ms -1", "--step-ms: '-1' is not a number from 0 to 60000"),
        ("overhead.__main__", "--interval-ms nan", "--interval-ms: 'nan' is not a number from 0 to 10000"),
        ("overhead.__main__", "--resume /", "--resume: / cannot be written"),
    ],
)
def test_what_makes_no_sense_is_named(
    module: str, arguments: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in said(module, arguments.split(), capsys)


@pytest.mark.parametrize(
    "error", [NotEnoughMemory("9M", 2**40, 2**30, "cpu", "625 KV blocks"), PromptTooLong(9000, 8191)]
)
def test_answers_that_do_not_fit_are_named(
    error: ServingError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the machine, or of the model: either was a traceback."""

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(several_answers.models, "build", lambda *_: "9M")
    monkeypatch.setattr(several_answers, "assemble", fails)
    told = said("several_answers", ["--prompt-tokens", "9000"], capsys)
    assert told.endswith(f"error: --n, --prompt-tokens, --output-tokens: {error}")
