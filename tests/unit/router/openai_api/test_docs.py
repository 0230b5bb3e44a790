"""docs/api.md shows the table of fields as it is."""

from __future__ import annotations

import re
from pathlib import Path

from router.openai_api.fields import FIELDS, Use

ROOT = Path(__file__).resolve().parents[4]
DOCUMENT = (ROOT / "docs" / "api.md").read_text()


def _section(title: str) -> str:
    return re.split(rf"^##+ {title}\n", DOCUMENT, flags=re.MULTILINE)[1].split("\n#")[0]


def _rows(title: str) -> list[list[str]]:
    cells = [line.strip("| ").split(" | ") for line in _section(title).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in cells]


def test_the_documented_fields_are_the_codes() -> None:
    for title, use in (
        ("Used", Use.USED),
        ("Refused unless neutral", Use.REFUSED),
        ("Accepted, no effect", Use.IGNORED),
    ):
        rows = [field for field in FIELDS if field.use is use]
        expected = [
            [f"`{field.name}`", "both" if len(field.endpoints) == 2 else field.endpoints[0].value]
            + ([] if use is Use.IGNORED else [field.accepts])
            for field in rows
        ]
        assert _rows(title) == expected


def test_every_code_in_the_errors_table_is_one_that_the_code_knows() -> None:
    package = Path(__file__).resolve().parents[4] / "router"
    source = "".join(path.read_text() for path in package.rglob("*.py"))
    codes = re.findall(r"`(\w+)`", DOCUMENT.split("## Errors")[1].split("|---|---|---|")[1])
    for code in codes:
        if code not in ("param",):
            assert f'"{code}"' in source, code
