"""The page as one document: nothing from elsewhere, nothing its policy would not let run, all installed."""

from __future__ import annotations

import base64
import hashlib
import re
import tomllib
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest

from router.dashboard.page import SCRIPTS, load_page

ROOT = Path(__file__).parents[4]


class Parts(HTMLParser):
    """Tags with their attributes, and what stands in style and script."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"style": [], "script": []}
        self._open: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in self.inside:
            self._open = tag
            self.inside[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._open:
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.inside[self._open][-1] += data


@pytest.fixture(scope="module")
def parts() -> Parts:
    found = Parts()
    found.feed(load_page().content.decode())
    return found


def test_the_policy_names_exactly_the_style_and_the_script_there_are(parts: Parts) -> None:
    policy = dict(directive.split(" ", 1) for directive in load_page().security_policy.split("; "))
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        [text] = parts.inside[tag]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
        assert len(text) > 1000
    assert policy["default-src"] == "'none'"
    assert "unsafe" not in load_page().security_policy


def test_nothing_comes_from_elsewhere(parts: Parts) -> None:
    content = load_page().content.decode()
    addresses = set(re.findall(r"https?://[^\s'\"]+", content))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace, not an address
    assert "@import" not in content
    for tag, attributes in parts.tags:
        assert tag not in {"iframe", "object", "embed", "img", "base"}
        assert not {"src", "srcset", "action"} & attributes.keys(), (tag, attributes)
        link = attributes.get("href") or ""
        assert link.startswith(("#", "data:")) or not link


def test_nothing_is_inline_and_no_text_becomes_markup(parts: Parts) -> None:
    for tag, attributes in parts.tags:
        assert "style" not in attributes, (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    [script] = parts.inside["script"]
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert forbidden not in script


def test_every_control_has_a_name(parts: Parts) -> None:
    ids = [attributes["id"] for _, attributes in parts.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in parts.tags:
        for reference in ("aria-labelledby", "aria-describedby", "for"):
            if reference in attributes:
                assert attributes[reference] in ids, (tag, attributes)
    languages = [attributes.get("lang") for tag, attributes in parts.tags if tag == "html"]
    assert languages == ["en"]


def test_the_scripts_ids_are_on_the_page(parts: Parts) -> None:
    [script] = parts.inside["script"]
    ids = {attributes["id"] for _, attributes in parts.tags if "id" in attributes}
    assert set(re.findall(r'\$\("([a-z-]+)"\)', script)) <= ids


def test_its_files_are_in_the_package_that_is_installed() -> None:
    names = {entry.name for entry in resources.files("router.dashboard").iterdir()}
    assert {"page.html", "page.css", "script"} <= names
    scripts = {entry.name for entry in resources.files("router.dashboard").joinpath("script").iterdir()}
    assert scripts == {f"{name}.js" for name in SCRIPTS}  # none forgotten
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # Hatchling takes every file of a package that git does not ignore.
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "router" in wheel["packages"]
    assert not {"exclude", "only-include"} & wheel.keys()
