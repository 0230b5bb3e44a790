"""Amounts as Kubernetes writes them: "500m" cores, "2Gi" of memory."""

from __future__ import annotations

import re
from decimal import Decimal

_SUFFIXES = {
    "": Decimal(1),
    **{letter: Decimal(1000) ** -power for power, letter in enumerate("mun", 1)},
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d{1,3})?")


def quantity(value: str | float) -> Decimal:
    """As a number: cores, or bytes. Raises ValueError."""
    found = _QUANTITY.fullmatch(str(value))
    if found is None:
        raise ValueError(f"{value!r} is no quantity")
    number, suffix = Decimal(found[1]), found[2] or ""
    return number * (_SUFFIXES[suffix] if suffix in _SUFFIXES else Decimal(f"1{suffix}"))
