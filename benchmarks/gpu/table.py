"""The results as one table of text, each beside the card's limits, and the targets. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.contender import GENERATE
from benchmarks.gpu.bench import (
    CARD,
    DECODE,
    FIRST,
    KERNEL,
    LIMITS,
    PREFILL,
    TOKENS,
    agreement,
    hit_label,
    label,
    parting,
)
from benchmarks.gpu.plan import (
    BACKENDS,
    DECODE_BATCH,
    DECODE_OF_BANDWIDTH,
    HIT_OVER_MISS,
    JUDGED_HIT,
    PREFILL_OF_MATRIX_RATE,
    SERVED,
    Plan,
)
from benchmarks.gpu.sheet import Result, Sheet

LABEL_WIDTH, CELL_WIDTH = 26, 18
ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target beside what one contender reached of it."""

    target: str
    contender: str
    required: str
    measured: str
    is_reached: bool | None  # None: nothing was measured that tells


def table(sheet: Sheet, names: Sequence[str], absent: Mapping[str, str], plan: Plan) -> list[str]:
    """Lines: a section's cases, and under each contender what it did. absent: why, by contender."""
    present = [name for name in names if name not in absent]
    lines = [*_card(sheet), _line("", present)]
    for section in (KERNEL, TOKENS, PREFILL, DECODE, FIRST):
        lines += _section(sheet, section, present)
    return [*lines, "", *_notes(sheet, absent, plan)]


def _card(sheet: Sheet) -> list[str]:
    limits = sheet.get(LIMITS, "", CARD)
    if limits is None:
        return []
    return [
        f"card: {limits.values['operations_per_s'] / 1e12:,.1f} TFLOP/s in a matrix product, "
        f"{limits.values['bytes_per_s'] / 1e9:,.0f} GB/s in a copy"
    ]


def _section(sheet: Sheet, section: str, names: Sequence[str]) -> list[str]:
    cases = _cases(sheet, section)
    lines = ["", TITLES[section]] if cases else []
    for case in cases:
        cells = [_cell(sheet, section, case, name) for name in names]
        if any(cells):
            lines.append(_line(f"  {case}", [cell or ABSENT for cell in cells]))
    return lines


def _notes(sheet: Sheet, absent: Mapping[str, str], plan: Plan) -> list[str]:
    lines = [f"{name} is not here: {reason}" for name, reason in absent.items()]
    failed = sorted({(each.contender, each.note) for each in sheet if each.is_missing})
    lines += [f"{name} {note}" for name, note in failed]
    if plan.has_targets:
        lines.insert(0, f"{SERVED} is to serve, and is held to the targets; the others are shown")
    return lines


TITLES = {
    KERNEL: "attention, relative error beside gather + SDPA in float32",
    TOKENS: "greedy tokens as generate's, before the first that differs / from the cache as computed",
    PREFILL: "prefill, tokens/s (operations needed, of the matrix rate)",
    DECODE: "decode, tokens/s (bytes needed, of the bandwidth)",
    FIRST: "first token, seconds (times as fast as with nothing cached)",
}


def verdicts(sheet: Sheet, plan: Plan) -> list[Verdict]:
    """Whether each of our backends that was measured is right; then the targets of the one to serve."""
    ours = [each for each in sheet if each.contender in BACKENDS and not each.is_missing]
    found = [_of_error(each) for each in ours if each.section == KERNEL]
    for each in ours:
        if each.section == TOKENS:
            generated = sheet.get(TOKENS, each.case, GENERATE)
            found += [
                _of_tokens("generate's tokens, computed", each, each.outputs, generated),
                _of_tokens("generate's tokens, from the cache", each, each.warm_outputs, generated),
            ]
    return [*found, *(_targets(sheet, plan) if plan.has_targets else ())]


def verdict_lines(found: Iterable[Verdict]) -> list[str]:
    """One each, in their order."""
    said = {True: "reached", False: "MISSED", None: "unknown"}
    return [
        f"{said[each.is_reached]:<7}  {each.contender:<12} {each.target}: "
        f"{each.measured}, wanted {each.required}"
        for each in found
    ]


def _of_error(result: Result) -> Verdict:
    error, most = result.values["error"], result.values["most_error"]
    target = f"attention error, {result.case}"
    return Verdict(target, result.contender, f"<= {most:.0e}", f"{error:.1e}", error <= most)


def _of_tokens(
    target: str, result: Result, outputs: tuple[tuple[int, ...], ...], generated: Result | None
) -> Verdict:
    """Whether each answer is generate's, or leaves it at a near-tie: what follows answers another text.

    In half precision the order of a sum decides between tokens whose logits it cannot tell apart.
    """
    if generated is None or generated.is_missing:
        return Verdict(target, result.contender, "the same", "generate was not measured", None)
    gaps = []
    for prompt, output in enumerate(outputs):
        place = parting(output, generated.outputs[prompt])
        if place < len(output):
            gaps.append(dict(generated.nearest[prompt][place]).get(output[place], float("inf")))
    most = generated.values["most_gap"]
    required = f"left for a logit at most {most:g} below"
    measured = f"{len(outputs) - len(gaps)} of {len(outputs)} answers the same"
    if gaps:
        measured += f", the others left for one {max(gaps):.3f} below"
    return Verdict(target, result.contender, required, measured, all(gap <= most for gap in gaps))


def _targets(sheet: Sheet, plan: Plan) -> list[Verdict]:
    def of(section: str, case: str) -> Result | None:
        return sheet.get(section, case, SERVED)

    return [
        *(
            _at_least(
                f"prefill of {label(case)}", _share(sheet, of(PREFILL, label(case))), PREFILL_OF_MATRIX_RATE
            )
            for case in plan.prefills
        ),
        *(
            _at_least(f"decode, {label(case)}", _share(sheet, of(DECODE, label(case))), DECODE_OF_BANDWIDTH)
            for case in plan.decodes
            if case.batch == DECODE_BATCH
        ),
        _at_least(
            f"first token, {hit_label(JUDGED_HIT)}",
            _gain(sheet, of(FIRST, hit_label(JUDGED_HIT))),
            HIT_OVER_MISS,
            "x",
        ),
    ]


def _at_least(target: str, measured: float | None, required: float, unit: str = "%") -> Verdict:
    def told(value: float) -> str:
        return f"{value:.0%}" if unit == "%" else f"{value:.2f}x"

    if measured is None:
        return Verdict(target, SERVED, f">= {told(required)}", "not measured", None)
    return Verdict(target, SERVED, f">= {told(required)}", told(measured), measured >= required)


def _cases(sheet: Sheet, section: str) -> list[str]:
    return list(dict.fromkeys(each.case for each in sheet if each.section == section))


def _cell(sheet: Sheet, section: str, case: str, name: str) -> str:
    """ "" where there is nothing to tell."""
    result = sheet.get(section, case, name)
    if result is None or result.is_missing:
        return ""
    if section == KERNEL:
        return f"{result.values['error']:.1e}"
    if section == TOKENS:
        generated = sheet.get(section, case, GENERATE)
        if generated is None or generated.is_missing:
            as_generate = "?"
        else:
            as_generate = f"{agreement(result.outputs, generated.outputs):.0%}"
        if not result.warm_outputs:
            return as_generate
        return f"{as_generate} / {agreement(result.warm_outputs, result.outputs):.0%}"
    if section == FIRST:
        gain = _gain(sheet, result)
        assert result.seconds is not None
        return f"{result.seconds:.4f}" + (f" ({gain:.2f}x)" if gain is not None else "")
    share = _share(sheet, result)
    return f"{result.values['tokens_per_s']:,.0f}" + (f" ({share:.0%})" if share is not None else "")


def _share(sheet: Sheet, result: Result | None) -> float | None:
    """Of the card's limit, where there is one for this, and this was measured."""
    if result is None or result.is_missing:
        return None
    rate = {PREFILL: "operations_per_s", DECODE: "bytes_per_s"}.get(result.section)
    limits = sheet.get(LIMITS, "", CARD)
    if rate is None or limits is None or limits.is_missing:
        return None
    return result.values[rate] / limits.values[rate]


def _gain(sheet: Sheet, result: Result | None) -> float | None:
    """Times as fast to the first token as with nothing cached."""
    if result is None or result.is_missing or result.section != FIRST or result.case == hit_label(0.0):
        return None
    miss = sheet.get(FIRST, hit_label(0.0), result.contender)
    if miss is None or miss.seconds is None or result.seconds is None:
        return None
    return miss.seconds / result.seconds


def _line(label: str, cells: Iterable[str]) -> str:
    return f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{CELL_WIDTH}}" for cell in cells)
