"""What is said of made-up results: right or not, reached or missed, and nothing of what was not measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.contender import GENERATE
from benchmarks.gpu.bench import CARD, DECODE, FIRST, KERNEL, LIMITS, PREFILL, TOKENS
from benchmarks.gpu.plan import FULL, GATHER, SERVED, TINY, TRITON, Plan
from benchmarks.gpu.sheet import Result, Sheet
from benchmarks.gpu.table import table, verdict_lines, verdicts

CARDS_LIMITS = Result(LIMITS, "", CARD, values={"operations_per_s": 100.0, "bytes_per_s": 100.0})
GENERATED = Result(
    TOKENS,
    "3",
    GENERATE,
    values={"most_gap": 0.25},
    outputs=((5, 6, 7), (8, 9, 1)),
    nearest=(
        (((5, 0.0), (2, 1.0)), ((6, 0.0), (3, 0.2)), ((7, 0.0), (4, 0.3))),
        (((8, 0.0), (2, 1.0)), ((9, 0.0), (3, 1.0)), ((1, 0.0), (4, 1.0))),
    ),
)


def sheet_of(folder: Path, results: Iterable[Result]) -> Sheet:
    sheet = Sheet(folder / "sheet.json", {})
    for result in results:
        sheet.add(result)
    return sheet


def judged(folder: Path, results: Iterable[Result], plan: Plan = FULL) -> dict[tuple[str, str], bool | None]:
    """By contender and what was to be reached."""
    found = verdicts(sheet_of(folder, results), plan)
    return {(each.contender, each.target): each.is_reached for each in found}


def measured(contender: str, share: float) -> list[Result]:
    """Everything with a target, at this share of the card's limits and as many times a miss's speed."""
    values = {"tokens_per_s": 1.0, "operations_per_s": 100 * share, "bytes_per_s": 100 * share}
    return [
        *(Result(PREFILL, f"{n:,} tokens", contender, 1.0, values) for n in (2048, 8192, 16384)),
        *(Result(DECODE, f"{n} x 1,024", contender, 1.0, values) for n in (1, 8, 64)),
        Result(FIRST, "0% cached", contender, 10 * share),
        Result(FIRST, "90% cached", contender, 1.0),
    ]


def test_only_the_backend_that_is_to_serve_is_held_to_the_targets(tmp_path: Path) -> None:
    """Gathering moves every number three times: it is shown, and cannot miss what it is not meant for."""
    results = [CARDS_LIMITS, *measured(TRITON, 0.7), *measured(GATHER, 0.1)]
    assert TRITON == SERVED
    assert judged(tmp_path, results) == {
        (TRITON, "prefill of 2,048 tokens"): True,
        (TRITON, "prefill of 8,192 tokens"): True,
        (TRITON, "prefill of 16,384 tokens"): True,
        (TRITON, "decode, 64 x 1,024"): True,
        (TRITON, "first token, 90% cached"): True,
    }
    told = table(sheet_of(tmp_path, ()), (TRITON, GATHER), {}, FULL)
    assert "triton is to serve, and is held to the targets; the others are shown" in told


def test_a_target_that_is_missed_says_by_how_much(tmp_path: Path) -> None:
    found = verdicts(sheet_of(tmp_path, [CARDS_LIMITS, *measured(TRITON, 0.5)]), FULL)
    assert verdict_lines(found)[2:] == [
        "reached  triton       prefill of 16,384 tokens: 50%, wanted >= 45%",
        "MISSED   triton       decode, 64 x 1,024: 50%, wanted >= 60%",
        "MISSED   triton       first token, 90% cached: 5.00x, wanted >= 6.50x",
    ]


@pytest.mark.parametrize("reason", ["absent", "failed", "no limits"])
def test_what_was_not_measured_is_never_reached(tmp_path: Path, reason: str) -> None:
    results = [CARDS_LIMITS, *measured(TRITON, 0.7)]
    if reason == "absent":
        results = [CARDS_LIMITS, *measured(GATHER, 0.7)]
    elif reason == "failed":
        results = [replace(each, note="failed: OutOfMemoryError") for each in results]
    else:
        results = results[1:]
    found = verdicts(sheet_of(tmp_path, results), FULL)
    assert len(found) == 5
    without_limits = [each.is_reached for each in found if not each.target.startswith("first token")]
    assert without_limits == [None] * 4
    assert all(line.startswith("unknown") for line in verdict_lines(found[:4]))
    if reason != "no limits":
        assert found[4].is_reached is None


def test_a_small_network_has_no_targets(tmp_path: Path) -> None:
    assert judged(tmp_path, [CARDS_LIMITS, *measured(TRITON, 0.1)], TINY) == {}


@pytest.mark.parametrize(
    ("computed", "cached", "expected"),
    [
        (((5, 6, 7), (8, 9, 1)), ((5, 6, 7), (8, 9, 1)), (True, True)),
        # At a near-tie the other token is as good, and everything after it is another text.
        (((5, 3, 0), (8, 9, 1)), ((5, 6, 7), (8, 9, 1)), (True, True)),
        (((5, 6, 4), (8, 9, 1)), ((5, 6, 7), (8, 9, 1)), (False, True)),  # 0.3 below
        (((5, 6, 7), (8, 9, 1)), ((5, 6, 7), (0, 9, 1)), (True, False)),  # not among the nearest
        (((5, 3, 0), (8, 3, 1)), ((5, 3, 0), (8, 9, 1)), (False, True)),  # the worst of several tells
    ],
)
def test_greedy_answers_may_leave_generates_at_a_near_tie_alone(
    tmp_path: Path,
    computed: tuple[tuple[int, ...], ...],
    cached: tuple[tuple[int, ...], ...],
    expected: tuple[bool, bool],
) -> None:
    ours = Result(TOKENS, "3", GATHER, outputs=computed, warm_outputs=cached)
    assert judged(tmp_path, [ours, GENERATED], TINY) == {
        (GATHER, "generate's tokens, computed"): expected[0],
        (GATHER, "generate's tokens, from the cache"): expected[1],
    }


@pytest.mark.parametrize("generated", [(), (replace(GENERATED, note="failed: OutOfMemoryError"),)])
def test_without_generate_nothing_is_said_of_tokens(tmp_path: Path, generated: tuple[Result, ...]) -> None:
    ours = Result(TOKENS, "3", TRITON, outputs=((1,),), warm_outputs=((1,),))
    assert list(judged(tmp_path, [ours, *generated], TINY).values()) == [None, None]


def test_attention_is_right_whichever_backend_computes_it(tmp_path: Path) -> None:
    results = [
        Result(KERNEL, "prompt", contender, values={"error": error, "most_error": 2e-2})
        for contender, error in ((TRITON, 1e-2), (GATHER, 3e-2))
    ]
    assert judged(tmp_path, results, TINY) == {
        (TRITON, "attention error, prompt"): True,
        (GATHER, "attention error, prompt"): False,
    }


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    ours = Result(TOKENS, "3", TRITON, outputs=((1,),), warm_outputs=((1,),))
    kept = list(sheet_of(tmp_path, [GENERATED, ours, CARDS_LIMITS]))
    assert list(Sheet(tmp_path / "sheet.json", {})) == kept
