"""Where a comparison's report goes: the terminal, and a folder with results.json, report.md, report.html."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from loadtest.comparison.page import page
from loadtest.comparison.results import Results, write, write_whole
from loadtest.comparison.tables import tables, warnings
from loadtest.placement.errors import BadRequest

JSON, MARKDOWN, PAGE = "results.json", "report.md", "report.html"


def check_plots(*, with_plots: bool) -> None:
    """Before anything runs. Raises BadRequest where plots are wanted and matplotlib is missing."""
    if with_plots:
        try:
            import loadtest.comparison.figures  # noqa: F401
        except ImportError as error:
            raise BadRequest(f"plots need the loadtest extra ({error}); --no-plots does without") from error


def markdown(results: Results) -> str:
    lines = [f"**{told}**\n" for told in warnings(results)]
    lines += [table.markdown() + "\n" for table in tables(results)]
    lines += [f"- {name}: {value}" for name, value in results.conditions.items()]
    lines += [f"- engine of {name}: {engine}" for name, engine in results.engines.items()]
    return "\n".join(lines) + "\n"


def report(results: Results, folder: Path, console: Console, *, with_plots: bool) -> None:
    """Print the tables, and write each file whole. Nothing is written where nothing ran."""
    if not results.runs:
        console.print("Nothing ran, so there is no report.")
        return
    for told in warnings(results):
        console.print(f"[yellow]{told}[/]", soft_wrap=True)
    for table in tables(results):
        table.print_on(console)
    write(folder / JSON, results)
    write_whole(folder / MARKDOWN, markdown(results).encode())
    if with_plots:
        from loadtest.comparison.figures import pictures

        write_whole(folder / PAGE, page(results, pictures(results)).encode())
    console.print(f"Report: {folder / (PAGE if with_plots else MARKDOWN)}", soft_wrap=True)
