"""A comparison as one HTML document without anything from elsewhere, light or dark as its reader has it.

Takes pictures as they are; knows nothing of what draws them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from loadtest.comparison.caveats import caveats
from loadtest.comparison.results import Results
from loadtest.comparison.tables import tables
from loadtest.text_table import TextTable

_CSS = """\
:root { color-scheme: light dark; --page: #ffffff; --ink: #1b1f24; --soft: #5d6670; --rule: #d7dce1;
  --warn: #8a4b00;
  --c1: #c2410c; --c2: #1d4ed8; --c3: #15803d; --c4: #7e22ce; --c5: #be185d; --c6: #0e7490; --c7: #854d0e;
  --c8: #4b5563; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --ink: #e6e9ec; --soft: #9aa4ae; --rule: #343b42; --warn: #f0b35b;
    --c1: #fb923c; --c2: #7aa2ff; --c3: #4ade80; --c4: #c99bff; --c5: #f78fc0; --c6: #5fd3e6; --c7: #d9b44a;
    --c8: #a5afba; } }
body { margin: 0 auto; max-width: 84rem; padding: 1.5rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
h1, h2, p, caption { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
caption { text-align: left; font-weight: 600; padding-bottom: .4rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--rule); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.note, dt { color: var(--soft); font-size: .9rem; } .warning { color: var(--warn); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; } dd { margin: 0; }
dd { overflow-wrap: anywhere; } svg { width: 100%; height: auto; } figure { margin: 1rem 0; }
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """svg: an element, put into the page as it is."""

    title: str
    svg: str


def page(results: Results, pictures: Iterable[Picture]) -> str:
    """The document: what is to be said against the numbers, tables, pictures in their order, conditions."""
    title = f"{results.contenders[0]} beside {len(results.contenders) - 1} others"
    if len(results.contenders) == 1:
        title = results.contenders[0]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_CSS}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *(f'<p class="warning">{escape(told)}</p>' for told in caveats(results)),
        *(_table(each) for each in tables(results)),
        *(f"<h2>{escape(each.title)}</h2><figure>{each.svg}</figure>" for each in pictures),
        "<h2>Conditions</h2>",
        _conditions(results),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _table(table: TextTable) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll"><table><caption>{escape(table.title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}"
    )


def _conditions(results: Results) -> str:
    told = {
        **results.conditions,
        **{f"engine of {name}": engine for name, engine in results.engines.items()},
        "seeds": ", ".join(map(str, results.seeds)),
        "repeats": str(results.num_repeats),
    }
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in told.items())
    return f"<dl>{rows}</dl>"
