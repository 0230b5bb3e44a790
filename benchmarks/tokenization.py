"""What a conversation's next turn costs to tokenize, by segment and whole.

Every row is one conversation; each repeat of "next turn" adds an answer and a question nobody has seen, so
nothing but the earlier turns can come from the cache. CPU time of the calling thread's process, medians.
Knows the prompt encoder; knows neither HTTP nor replicas.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import positive, to_write
from benchmarks.machine import CPUINFO, commit, cpu_name
from benchmarks.stopping import stoppable
from cache.counted import counted
from cache.errors import ConfigError
from router.prompts.chat import Chat
from router.prompts.prompt import PromptEncoder, hide_torch

ROOT = Path(__file__).parents[1]
TINY = ROOT / "replica" / "models" / "tiny"
CONVERSATIONS = ((1024, 4), (8192, 16), (32768, 32))  # (tokens, messages) before the next turn
EPILOG = """\
examples:
  make bench-tokenizer
  python -m benchmarks.tokenization --repeats 5 --tokenizer FOLDER --json out.json
"""
NEW_TOKENS = 128  # of the answer and of the next question, each

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation. All times are medians in milliseconds of CPU."""

    prompt_tokens: int
    messages: int
    new_tokens: int  # in the messages the next turn adds
    render_ms: float  # the template alone, a part of every other time
    whole_ms: float  # without a cache
    first_ms: float  # with a cache that has seen nothing
    next_turn_ms: float  # with one that has seen the turns before
    again_ms: float  # with one that has seen all of it

    @property
    def gain(self) -> float:
        return self.whole_ms / self.next_turn_ms


class Writer:
    """Text that never repeats: pieces of a corpus under a running number."""

    def __init__(self, corpus: str, chars_per_token: float) -> None:
        self._corpus = corpus
        self._chars_per_token = chars_per_token
        self._number = 0

    def text(self, num_tokens: int) -> str:
        self._number += 1
        length = int(num_tokens * self._chars_per_token)
        start = self._number * 7919 % len(self._corpus)
        repeats = 1 + (start + length) // len(self._corpus)
        return f"{self._number}. " + (self._corpus * repeats)[start : start + length]

    def conversation(self, num_tokens: int, num_messages: int) -> Messages:
        """Ends with a question."""
        roles = ["user", "assistant"] * (num_messages // 2) + ["user"]
        return [{"role": role, "content": self.text(num_tokens // len(roles))} for role in roles]

    def next_turn(self, messages: Messages) -> Messages:
        """The same with an answer and another question."""
        answer, question = self.text(NEW_TOKENS), self.text(NEW_TOKENS)
        return [
            *messages,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": question},
        ]


def measure(source: str, repeats: int) -> list[Row]:
    """One row per conversation. Raises ConfigError for a folder without a tokenizer."""
    whole = PromptEncoder.load(source, cache_bytes=0)
    corpus = (TINY / "corpus.txt").read_text()
    writer = Writer(corpus, len(corpus) / len(whole.text(corpus)))
    return [
        _row(whole, source, writer, writer.conversation(tokens, messages), repeats)
        for tokens, messages in CONVERSATIONS
    ]


def _row(whole: PromptEncoder, source: str, writer: Writer, messages: Messages, repeats: int) -> Row:
    warm = PromptEncoder.load(source, cache_bytes=256 << 20)
    if warm.whole_reason is not None:
        raise SystemExit(f"{source}: {warm.whole_reason}; nothing to compare")
    turns = [Chat(writer.next_turn(messages)) for _ in range(repeats)]
    before = warm.chat(Chat(messages))
    next_turn_ms = _median_ms([partial(warm.chat, turn) for turn in turns])
    ids = whole.chat(turns[0])
    assert warm.chat(turns[0]) == ids
    return Row(
        prompt_tokens=len(ids),
        messages=len(turns[0].messages),
        new_tokens=len(ids) - len(before),
        render_ms=_median_ms([partial(warm.render, turn) for turn in turns]),
        whole_ms=_median_ms([partial(whole.chat, turn) for turn in turns]),
        first_ms=_median_ms([partial(warm.chat, turn, salt=str(n)) for n, turn in enumerate(turns)]),
        next_turn_ms=next_turn_ms,
        again_ms=_median_ms([partial(warm.chat, turn) for turn in turns]),
    )


def _median_ms(calls: Sequence[Callable[[], object]]) -> float:
    times = []
    for call in calls:
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return 1000 * statistics.median(times)


def table(rows: Sequence[Row]) -> Table:
    """All rows; fits 100 columns."""
    result = Table(box=SIMPLE_HEAD, show_edge=False)
    titles = (
        "prompt tokens",
        "messages",
        "new",
        "render",
        "whole",
        "first seen",
        "next turn",
        "again",
        "gain",
    )
    for title in titles:
        result.add_column(title, justify="right")
    for row in rows:
        times = (row.render_ms, row.whole_ms, row.first_ms, row.next_turn_ms, row.again_ms)
        result.add_row(
            *map(str, (row.prompt_tokens, row.messages, row.new_tokens)),
            *(f"{time_ms:.2f}" for time_ms in times),
            f"{row.gain:.0f}x",
        )
    return result


def machine() -> str:
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "tokenizers")
    )
    return (
        f"{cpu_name(CPUINFO.read_text())}, {counted(os.cpu_count() or 1, 'core')}, "
        f"Python {platform.python_version()}, {versions}, git {commit(ROOT)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tokenization",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=positive, default=30, help="measurements per number (default 30)")
    parser.add_argument("--tokenizer", default=str(TINY), help="folder or hub id (default: the embedded one)")
    parser.add_argument("--json", type=to_write, help="write the rows here as well")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one thread's work, counted once
    hide_torch()
    try:
        rows = measure(arguments.tokenizer, arguments.repeats)
    except ConfigError as error:
        parser.error(str(error))
    console = Console(width=100)
    console.print(f"Tokenizing a conversation's next turn, ms of CPU (medians of {arguments.repeats})")
    console.print(table(rows))
    console.print(f"next turn = {NEW_TOKENS} new tokens each of answer and question behind earlier turns")
    console.print(machine())
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(stoppable(main))
