"""The page as one document: its looks and its script inside, and a policy that lets nothing else run.

One document, because it is all that can be had without a token: whoever opens it has given none yet, and
gives it to the script, which sends it with each question. The policy names script and style by their digests,
so neither an injected script, an inline handler nor anything from elsewhere would run.

Knows the package's files; knows neither HTTP nor data.
Source: Content Security Policy Level 3 (W3C).
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

SCRIPTS = (
    *("words", "elements", "routers", "asking", "status", "tiles", "first_token", "why"),
    *("prefixes", "pins", "fleet", "decisions", "page"),
)
"""The script's parts, in the order they are put together: one closure, whose names nobody else sees."""

_STYLE_MARK, _SCRIPT_MARK = "/* page.css */", "/* script */"


@dataclass(frozen=True, slots=True)
class Page:
    """What a browser gets."""

    content: bytes  # HTML, UTF-8
    etag: str
    security_policy: str  # for the content-security-policy header


@cache
def load_page() -> Page:
    """The package's page. Raises FileNotFoundError if it was installed without its files."""
    style, script = _read("page.css"), _script()
    html = _read("page.html")
    for mark, text in ((_STYLE_MARK, style), (_SCRIPT_MARK, script)):
        assert html.count(mark) == 1
        html = html.replace(mark, text)
    content = html.encode()
    return Page(
        content,
        etag=f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        security_policy="; ".join(
            (
                "default-src 'none'",
                f"script-src '{_digest(script)}'",
                f"style-src '{_digest(style)}'",
                "connect-src 'self'",
                "img-src data:",  # its icon
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
                "require-trusted-types-for 'script'",  # no text ever becomes markup
            )
        ),
    )


def _read(*path: str) -> str:
    return resources.files("router.dashboard").joinpath(*path).read_text(encoding="utf-8")


def _script() -> str:
    parts = "\n".join([_read("script", f"{name}.js") for name in SCRIPTS])
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
