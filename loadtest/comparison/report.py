"""Where a comparison's report goes: the terminal, and a folder with results.json, report.md, report.html."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from loadtest.comparison.caveats import caveats
from loadtest.comparison.page import page
from loadtest.comparison.results import Results, write
from loadtest.comparison.tables import tables
from loadtest.placement.errors import NoPlots, NotWritten
from loadtest.report_folder import remove_earlier, reporting, write_whole

JSON, MARKDOWN, PAGE = "results.json", "report.md", "report.html"


def check_plots(*, with_plots: bool) -> None:
    """Before anything runs. Raises NoPlots where plots are wanted and what draws them is missing."""
    if with_plots:
        try:
            import loadtest.comparison.figures  # noqa: F401
        except ModuleNotFoundError as error:
            raise NoPlots(error.name) from error


def markdown(results: Results) -> str:
    lines = [f"**{told}**\n" for told in caveats(results)]
    lines += [table.markdown() + "\n" for table in tables(results)]
    lines += [f"- {name}: {value}" for name, value in results.conditions.items()]
    lines += [f"- engine of {name}: {engine}" for name, engine in results.engines.items()]
    lines += [f"- seeds: {_seeds(results)}", f"- repeats: {results.num_repeats}"]
    return "\n".join(lines) + "\n"


def _seeds(results: Results) -> str:
    return ", ".join(map(str, results.seeds))


def report(results: Results, folder: Path, console: Console, *, with_plots: bool) -> None:
    """Write each file whole, and print the tables. Nothing is written where nothing ran.

    Files first: a terminal may be gone by now. Raises NotWritten, and prints the tables all the same.
    """
    if not results.runs:
        console.print("Nothing was measured, so there is no report.")
        return
    failed: NotWritten | None = None
    try:
        with reporting(folder):
            _write(results, folder, with_plots=with_plots)
    except NotWritten as error:
        failed = error
    for told in caveats(results):
        console.print(told, style="yellow", soft_wrap=True, markup=False)
    for table in tables(results):
        table.print_on(console)
    console.print(f"Seeds: {_seeds(results)}", soft_wrap=True)
    if failed is not None:
        raise failed
    console.print(f"Report: {folder / (PAGE if with_plots else MARKDOWN)}", soft_wrap=True, markup=False)


def _write(results: Results, folder: Path, *, with_plots: bool) -> None:
    """Raises OSError."""
    remove_earlier(folder, JSON, MARKDOWN, PAGE)
    write(folder / JSON, results)
    write_whole(folder / MARKDOWN, markdown(results).encode())
    if with_plots:
        from loadtest.comparison.figures import pictures

        write_whole(folder / PAGE, page(results, pictures(results)).encode())
