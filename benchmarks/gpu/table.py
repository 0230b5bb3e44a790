"""The results as one table of text, each beside the card's limits, and the targets. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.contenders import GENERATE
from benchmarks.gpu.bench import CARD, DECODE, FIRST, KERNEL, LIMITS, PREFILL, TOKENS, agreement, hit_label
from benchmarks.gpu.plan import (
    BACKENDS,
    DECODE_BATCH,
    DECODE_OF_BANDWIDTH,
    HIT_OVER_MISS,
    JUDGED_HIT,
    PREFILL_OF_MATRIX_RATE,
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
    is_reached: bool


def table(sheet: Sheet, names: Sequence[str], absent: Mapping[str, str]) -> list[str]:
    """Lines: a section's cases, and under each contender what it did. absent: why, by contender."""
    names = [name for name in names if name not in absent]
    lines = []
    limits = sheet.get(LIMITS, "", CARD)
    if limits is not None:
        lines += [
            f"card: {limits.values['operations_per_s'] / 1e12:,.1f} TFLOP/s in a matrix product, "
            f"{limits.values['bytes_per_s'] / 1e9:,.0f} GB/s in a copy"
        ]
    lines.append(_line("", names))
    for section in (KERNEL, TOKENS, PREFILL, DECODE, FIRST):
        cases = _cases(sheet, section)
        if cases:
            lines += ["", TITLES[section]]
        for case in cases:
            cells = [_cell(sheet, section, case, name) for name in names]
            if any(cells):
                lines.append(_line(f"  {case}", [cell or ABSENT for cell in cells]))
    failed = sorted({(each.contender, each.note) for each in sheet if each.is_missing})
    return [
        *lines,
        "",
        *(f"{name} is not here: {reason}" for name, reason in absent.items()),
        *(f"{name} {note}" for name, note in failed),
    ]


TITLES = {
    KERNEL: "attention, relative error beside gather + SDPA in float32",
    TOKENS: "greedy tokens as generate's, before the first that differs / from the cache as computed",
    PREFILL: "prefill, tokens/s (operations needed, of the matrix rate)",
    DECODE: "decode, tokens/s (bytes needed, of the bandwidth)",
    FIRST: "first token, seconds (times as fast as with nothing cached)",
}


def verdicts(sheet: Sheet, plan: Plan) -> list[Verdict]:
    """The targets, for each of our backends that was measured."""
    found = []
    for each in sheet:
        if each.is_missing or each.contender not in BACKENDS:
            continue
        if each.section == KERNEL:
            error, most = each.values["error"], each.values["most_error"]
            target = f"attention error, {each.case}"
            found.append(Verdict(target, each.contender, f"<= {most:.0e}", f"{error:.1e}", error <= most))
        if not plan.has_targets:
            continue
        share = _share(sheet, each)
        if each.section == PREFILL and share is not None:
            found.append(_at_least(f"prefill of {each.case}", each, share, PREFILL_OF_MATRIX_RATE, "%"))
        if each.section == DECODE and share is not None and each.case.startswith(f"{DECODE_BATCH} x"):
            found.append(_at_least(f"decode, {each.case}", each, share, DECODE_OF_BANDWIDTH, "%"))
        gain = _gain(sheet, each)
        if each.case == hit_label(JUDGED_HIT) and gain is not None:
            found.append(_at_least(f"first token, {each.case}", each, gain, HIT_OVER_MISS, "x"))
    return found


def verdict_lines(found: Iterable[Verdict]) -> list[str]:
    return [
        f"{'reached' if each.is_reached else 'MISSED '}  {each.contender:<12} {each.target}: "
        f"{each.measured}, wanted {each.required}"
        for each in found
    ]


def _at_least(target: str, result: Result, measured: float, required: float, unit: str) -> Verdict:
    def told(value: float) -> str:
        return f"{value:.0%}" if unit == "%" else f"{value:.2f}x"

    return Verdict(target, result.contender, f">= {told(required)}", told(measured), measured >= required)


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
        as_generate = "?" if generated is None else f"{agreement(result.outputs, generated.outputs):.0%}"
        warm = result.values.get("warm_as_cold")
        return as_generate if warm is None else f"{as_generate} / {warm:.0%}"
    if section == FIRST:
        gain = _gain(sheet, result)
        assert result.seconds is not None
        return f"{result.seconds:.4f}" + (f" ({gain:.2f}x)" if gain is not None else "")
    share = _share(sheet, result)
    return f"{result.values['tokens_per_s']:,.0f}" + (f" ({share:.0%})" if share is not None else "")


def _share(sheet: Sheet, result: Result) -> float | None:
    """Of the card's limit, where there is one for this."""
    rate = {PREFILL: "operations_per_s", DECODE: "bytes_per_s"}.get(result.section)
    limits = sheet.get(LIMITS, "", CARD)
    if rate is None or limits is None or limits.is_missing:
        return None
    return result.values[rate] / limits.values[rate]


def _gain(sheet: Sheet, result: Result) -> float | None:
    """Times as fast to the first token as with nothing cached."""
    if result.section != FIRST or result.case == hit_label(0.0):
        return None
    miss = sheet.get(FIRST, hit_label(0.0), result.contender)
    if miss is None or miss.seconds is None or result.seconds is None:
        return None
    return miss.seconds / result.seconds


def _line(label: str, cells: Iterable[str]) -> str:
    return f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:>{CELL_WIDTH}}" for cell in cells)
