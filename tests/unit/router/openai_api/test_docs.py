"""docs/api.md shows the table of fields as it is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deploy.config import ROUTER_KEYS_FROM_DEPLOY
from replica.config import ReplicaConfig, SimConfig
from router.config import RecordConfig, RouterConfig
from router.limits import Limits
from router.openai_api.fields import FIELDS, Use

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

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


def test_the_documented_limits_are_the_codes() -> None:
    expected = [(f"`{field.name}`", str(field.default)) for field in dataclasses.fields(Limits)]
    assert [tuple(row[:2]) for row in _rows("Limits")] == expected


def test_the_documented_settings_are_the_codes() -> None:
    """Each with its default, however it is written."""
    configs = (RouterConfig, ReplicaConfig)
    defaults = {field.name: field for config in configs for field in dataclasses.fields(config)}
    written = {"null": None, "none": None, "true": True}
    for name, told, _ in _rows("Settings for special cases"):
        field = defaults[name.strip("`")]
        default = field.default if field.default is not dataclasses.MISSING else None
        assert (written[told] if told in written else float(told)) == default, name


@pytest.mark.parametrize(
    "config", [RouterConfig, RecordConfig, ReplicaConfig, SimConfig], ids=lambda config: config.__name__
)
def test_every_setting_is_in_some_document(config: type[DataclassInstance]) -> None:
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), ROOT / "deploy.yaml"]
    words = set(
        re.findall(r"\w+", "".join(page.read_text() for page in pages if page.name != "CHANGELOG.md"))
    )
    names = {field.name for field in dataclasses.fields(config)} - ROUTER_KEYS_FROM_DEPLOY
    assert sorted(names - words) == []


def test_every_code_in_the_errors_table_is_one_that_the_code_knows() -> None:
    package = Path(__file__).resolve().parents[4] / "router"
    source = "".join(path.read_text() for path in package.rglob("*.py"))
    codes = re.findall(r"`(\w+)`", DOCUMENT.split("## Errors")[1].split("|---|---|---|")[1])
    for code in codes:
        if code not in ("param",):
            assert f'"{code}"' in source, code
