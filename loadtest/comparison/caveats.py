"""What makes a comparison's numbers less than they seem, told above its tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cache.counted import counted
from loadtest.client.answer import Failure
from loadtest.comparison.results import Results, Run
from loadtest.comparison.tables import ms, percent

LATE_S = 0.05  # beyond it the client itself is part of what was measured
FAILED_SHARE = 0.01  # of requests without an answer: from there on a p99 of the others says little
KNOWN_SHARE = (
    0.2  # of prompt tokens, more than a cache that begins empty could hit: finer blocks hit a few more
)


def caveats(results: Results) -> list[str]:
    """One sentence or more for each; none where nothing is known against the numbers."""
    return [told for caveat in _CAVEATS if (told := caveat(results)) is not None]


def _ended(results: Results) -> str | None:
    if not results.ended_by:
        return None
    return f"Ended by an error before the end: only what ran is shown. {results.ended_by}"


def _stopped(results: Results) -> str | None:
    if not results.was_stopped:
        return None
    return f"Stopped before the end: only what ran is shown. {_cut_short(results)}".rstrip()


def _cut_short(results: Results) -> str:
    """What became of the run that was on its way."""
    run = results.cut_short
    if run is None:
        return ""
    is_shown = run in results.shown(run.contender, run.workload, run.rate_per_s)
    return (
        f"{run.contender}, {run.workload} at {run.rate_per_s:g}/s was cut short in repeat {run.repeat + 1}: "
        f"{counted(run.tally.due, 'request')} sent, {run.tally.answers} answered, {run.tally.num_failed} "
        f"failed, and {run.tally.unanswered} on their way, which count as neither."
        f"{'' if is_shown else ' No table has it.'}"
    )


def _client_was_late(results: Results) -> str | None:
    late = [
        run for run in results.runs if (run.is_whole or run.kind == "fixed") and _p99_late_s(run) > LATE_S
    ]
    if not late:
        return None
    worst = max(late, key=_p99_late_s)
    return (
        f"The client was late: in {len(late)} of {counted(len(results.runs), 'run')} the p99 of lateness "
        f"is above {ms(LATE_S)}, at worst {ms(_p99_late_s(worst))} "
        f"({worst.contender}, {worst.workload} at {worst.rate_per_s:g}/s). "
        "Times count from when a request was due: lateness is in them."
    )


def _p99_late_s(run: Run) -> float:
    return run.tally.late.quantile_s(0.99)


def _many_failed(results: Results) -> str | None:
    failed = [run for run in results.runs if run.kind == "fixed" and _failed_share(run) > FAILED_SHARE]
    if not failed:
        return None
    worst = max(failed, key=_failed_share)
    return (
        f"Times are those of answers: in {len(failed)} of {counted(len(results.runs), 'run')} more than "
        f"{percent(FAILED_SHARE)} of the requests had none, at worst {percent(_failed_share(worst))} "
        f"({worst.contender}, {worst.workload} at {worst.rate_per_s:g}/s). Who leaves out the latest is "
        "no sooner for that: goodput counts them."
    )


def _failed_share(run: Run) -> float:
    """Of the requests that are over."""
    tally = run.tally
    num_over = tally.num_failed + tally.answers
    return tally.num_failed / num_over if num_over else 0.0


def _colder(results: Results) -> str | None:
    failed = [run for run in results.runs if run.kind == "fixed" and run.tally.warming_failures]
    if not failed:
        return None
    worst = max(failed, key=_num_not_warmed)
    return (
        f"Caches were colder than they should be: in {len(failed)} of {counted(len(results.runs), 'run')} "
        "some of the requests that only warm them failed, at worst "
        f"{_kinds(worst.tally.warming_failures)} "
        f"({worst.contender}, {worst.workload} at {worst.rate_per_s:g}/s). No table counts those."
    )


def _num_not_warmed(run: Run) -> int:
    return sum(run.tally.warming_failures.values())


def _broken_tries(results: Results) -> str | None:
    tries = [run for run in results.runs if run.kind == "search"]
    broken = [run for run in tries if run.tally.broken]
    if not broken:
        return None
    worst = max(broken, key=lambda run: sum(run.tally.broken.values()))
    return (
        f"Answers broke in {len(broken)} of {counted(len(tries), 'run')} that searched for a rate, at worst "
        f"{_kinds(worst.tally.broken)} ({worst.contender}, {worst.workload} at {worst.rate_per_s:.3g}/s). "
        "They make a rate too high as late ones do, also where it was not the rate that broke them."
    )


def _kinds(failures: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in failures.items())


def _out_of_files(results: Results) -> str | None:
    unsent = sum(run.tally.failures.get(Failure.NO_FILES, 0) for run in results.runs)
    if not unsent:
        return None
    return (
        f"The client ran out of open files: {counted(unsent, 'request')} never went out, which is "
        "no fault of the server. Raise the limit (`ulimit -n`)."
    )


def _untold_hits(results: Results) -> str | None:
    if not any(run.tally.untold for run in results.runs):
        return None
    return "Some answers did not tell their cached tokens: hit rates leave them out."


def _known_before(results: Results) -> str | None:
    known = [run for run in results.runs if run.is_whole and _hit_ratio(run) > run.ceiling + KNOWN_SHARE]
    if not known:
        return None
    most = max(known, key=lambda run: _hit_ratio(run) - run.ceiling)
    return (
        f"Prompts were cached before they were sent: {percent(_hit_ratio(most))} of their "
        f"tokens ({most.contender}, {most.workload}), where an infinite cache that begins empty would "
        f"hit {percent(most.ceiling)}. A server that was sent them before needs another --seed."
    )


def _hit_ratio(run: Run) -> float:
    """0 where no answer told its cached tokens."""
    return run.tally.hit_ratio or 0.0


def _one_repeat(results: Results) -> str | None:
    if results.num_repeats != 1:
        return None
    return "One repeat: there are no intervals, and a difference may be chance."


_CAVEATS: tuple[Callable[[Results], str | None], ...] = (  # in the order told
    _ended,
    _stopped,
    _client_was_late,
    _many_failed,
    _colder,
    _broken_tries,
    _out_of_files,
    _untold_hits,
    _known_before,
    _one_repeat,
)
