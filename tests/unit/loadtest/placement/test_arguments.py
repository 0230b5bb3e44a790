"""What the command line reads, and what it says to what it cannot read."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.placement import arguments as read
from loadtest.simulation.cell import Failure, Scaling


@pytest.mark.parametrize(
    ("reader", "text", "value"),
    [
        (read.different(read.count), "4,16,64", (4, 16, 64)),
        (read.list_of(read.load), "2,1,1", (2.0, 1.0, 1.0)),
        (read.seeds, "0-3", (0, 1, 2, 3)),
        (read.seeds, "7,3", (7, 3)),
        (read.tokens, "400k", 400_000),
        (read.tokens, "1.5M", 1_500_000),
        (read.tokens, "512", 512),
        (read.failure, "60:2", Failure(60.0, 2)),
        (read.failure, "60:0:10", Failure(60.0, 0, 10.0)),
        (read.scaling, "60:8", Scaling(60.0, 8)),
        (read.seconds, "0", 0.0),
        (read.share, "0", 0.0),
    ],
)
def test_reads(reader: Callable[[str], Any], text: str, value: object) -> None:
    assert reader(text) == value


@pytest.mark.parametrize(
    ("reader", "text", "told"),
    [
        (read.different(read.count), "4,4", "twice"),
        (read.different(read.count), "4,", "not a whole number"),
        (read.count, "0", "below 1"),
        (read.load, "0", "not above 0"),
        (read.load, "nan", "not a finite number"),
        (read.load, "inf", "not a finite number"),
        (read.seconds, "-1", "below 0"),
        (read.positive_seconds, "-3", "not above 0"),
        (read.share, "1", "not below 1"),
        (read.seeds, "3-0", "empty"),
        (read.seeds, "-1", "not a whole number"),
        (read.tokens, "0.5", "not a number of tokens"),
        (read.tokens, "M", "not a number"),
        (read.tokens, "", "not a number"),
        (read.failure, "60", "SECOND:REPLICA"),
        (read.failure, "60:x", "not a whole number"),
        (read.scaling, "60", "SECOND:REPLICAS"),
        (read.scaling, "60:0", "below 1"),
        (read.generator, "nonsense", "agent_loops"),
        (read.generator, "multi_turn:turns", "name=value"),
        (read.generator, "multi_turn:nonsense=1", "think_s"),
        (read.generator, "multi_turn:turns=0", "turns"),
        (read.generator, "multi_turn:turns=2,think_s=1,turns=3", "'turns' twice"),
        (read.machine, "per_token_s=1e-5,base_s=0.1,per_token_s=2e-5", "'per_token_s' twice"),
        (read.machine, "nonsense=1", "per_token_s"),
        (read.machine, "base_s=-1", "negative"),
        (read.machine, "max_running=2.7", "max_running must be a whole number, not 2.7"),
        (read.machine, "num_engines=2,max_model_len=0.5", "max_model_len must be a whole number"),
        (read.generator, "multi_turn:num_prompts=1.9", "num_prompts = 1.9 is not a whole number"),
        (read.machine, "scheduling_order=1", r"NAME\+shortest.*base_s"),
        (read.machine, "scheduling_order=shortest", r"NAME\+shortest.*base_s"),
        (read.machine, "num_engines=0.5", "less than 1"),
        (read.trace, "no/such/file", "no file"),
    ],
)
def test_refuses(reader: Callable[[str], Any], text: str, told: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=told):
        reader(text)


def test_a_generator_with_parameters() -> None:
    found = read.generator("multi_turn:think_s=10,turns=8")
    assert found.label == "multi_turn:think_s=10,turns=8"
    assert found.open().name == "multi_turn"


def test_machine_constants_change_one_by_one() -> None:
    found = read.machine("per_token_s=1e-5,max_batched_tokens=2.048e3")
    assert (found.per_token_s, found.max_batched_tokens) == (1e-5, 2048)


def test_a_machine_that_all_replicas_share() -> None:
    found = read.machine("num_engines=1.5,base_s=0.004")
    assert found.base_s == 0.004
    assert found.engines_at_once(4) == 1.5
    assert "one machine that computes 1.5 at full speed" in found.describe()


def test_a_trace_with_a_generators_name_is_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator was simulated in its place, without a word."""
    monkeypatch.chdir(tmp_path)
    Path("no_reuse").touch()
    assert not read.trace("no_reuse").is_generated
    assert not read.trace("./no_reuse").is_generated
    assert read.trace("no_reuse").label == "no_reuse"
