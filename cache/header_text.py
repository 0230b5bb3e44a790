"""What an HTTP header carries as it is. Knows text; knows no headers."""

from __future__ import annotations


def fits_header(text: str) -> bool:
    """Whether it arrives as it was sent: printable ASCII, without white space around it (RFC 9110, 5.5)."""
    return text.isascii() and text.isprintable() and text == text.strip()
