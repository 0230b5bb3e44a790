"""Links in the documents lead somewhere: the file is there, and so is the heading."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
OTHERS = ("*.py", "*.yaml", "*.txt")
FOLDERS = ("benchmarks", "cache", "deploy", "k8s", "loadtest", "replica", "router", "tests")
BY_NAME = re.compile(r"warmpath\[(?=[a-z])|pip install[^\n]*[ '\"]warmpath(?=[ '\"=<>\n])")
MENTION = re.compile(r"(?<![\w/.])(docs/[\w/-]+\.md)(?:#([\w-]+))?")


@cache
def _prose(page: Path) -> str:
    """The page without its blocks of code, whose brackets are no links and whose # are no headings."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@cache
def _anchors(page: Path) -> frozenset[str]:
    """As GitHub makes them: a heading that is there again gets a number."""
    found: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE):
        found[re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")] += 1
    again = {f"{anchor}-{number}" for anchor, count in found.items() for number in range(1, count)}
    return frozenset(found) | again


def _missing(source: Path, file: Path, anchor: str) -> list[str]:
    if not file.exists():
        return [f"{source.relative_to(ROOT)}: no file {file}"]
    if anchor and anchor not in _anchors(file):
        return [f"{source.relative_to(ROOT)}: no heading #{anchor} in {file.relative_to(ROOT)}"]
    return []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    missing: list[str] = []
    for target in LINK.findall(re.sub(r"`[^`\n]*`", "", _prose(page))):
        name, _, anchor = target.partition("#")
        missing += _missing(page, (page.parent / name).resolve() if name else page, anchor)
    assert missing == []


def test_documents_that_sources_name_are_there() -> None:
    missing: list[str] = []
    named = (path for folder in FOLDERS for kind in OTHERS for path in (ROOT / folder).rglob(kind))
    for source in [ROOT / "Makefile", *named]:
        for name, anchor in MENTION.findall(source.read_text()):
            missing += _missing(source, ROOT / name, anchor)
    assert missing == []


def test_nobody_is_told_to_install_us_by_name() -> None:
    """`warmpath` on PyPI is somebody else's: whoever lacks an extra would run a stranger's code."""
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    sources = (path for folder in FOLDERS for kind in OTHERS for path in (ROOT / folder).rglob(kind))
    texts = [*pages, *sources, *ROOT.glob("*.yaml"), ROOT / "Makefile", ROOT / "Dockerfile"]
    assert [text for text in texts if BY_NAME.search(text.read_text())] == []
