"""What sockets take for a machine's name or address. Knows text; looks nothing up."""

from __future__ import annotations

HOST_FORM = "must be an address or a name, whose parts between dots have 1 to 63 characters"


def is_host(text: str) -> bool:
    """Whether it can be looked up: else Python raises UnicodeError, which is no error of sockets."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return True
