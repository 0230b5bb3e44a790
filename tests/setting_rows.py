"""Rows of docs/configuration.md, and values that try what a row allows.

A cell of what is allowed has alternatives, `; ` between them. Each is a range (`1 to 64`, `above 0.0 to 9.5`,
`0 or more`; fractions where there is a decimal point), a list of values in backticks, or one of `WORDS`. What
stands in brackets at its end is a remark.
Knows the page's form; knows no settings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from deploy.scaling_options import POLICY
from router.policies import NAMES

REQUIRED = "required"
NONE_OF_THEM = "nonesuch"

WORDS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {  # accepted, refused
    "text": (("x",), (3,)),
    "text of 16 characters or more": (("k" * 16,), ("k" * 15,)),
    "printable text of 16 characters or more": (("k" * 16,), ("k" * 15, "k" * 16 + "\n")),
    "a whole number": ((-1, 1 << 40), (1.5, "x")),
    "a number": ((1.5,), ("x",)),
    "a mapping": (({},), (3,)),
    "an absolute path": (("/etc/warmpath",), ("warmpath", "~/warmpath")),
    "a path": (("/llm",), ("llm", "/llm/")),
    "an address of the node": (("10.0.0.1", "node"), ("0.0.0.0", "*", "")),
    "an address of the node, or all": (("10.0.0.1", "0.0.0.0"), ("",)),
    "a list of origins": (
        (
            [],
            ["*"],
            ["https://chat.example", "http://localhost:3000", "http://[::1]:3000", "app://obsidian.md"],
        ),
        (
            "https://chat.example",
            *([each] for each in ("chat.example", "https://chat.example/", "https://Chat.example", "null")),
            *([each] for each in ("http://chat.example:80", "https://chat.example:443", "https://*.example")),
        ),
    ),
    "a policy's name": (NAMES, (NONE_OF_THEM,)),
    "an exporter's name": (("console",), (NONE_OF_THEM,)),
    "a function's name": ((POLICY,), ("no.such:thing",)),
}


@dataclass(frozen=True)
class Row:
    """One setting as the page has it."""

    key: str
    default: Any
    shipped: Any  # in the project's deploy.yaml; the default where nothing else is told
    allowed: str

    @classmethod
    def of(cls, key: str, default: str, allowed: str, told: str) -> Row:
        assert told, key
        first, _, shipped = default.partition("; ")
        value = REQUIRED if first == REQUIRED else value_of(first)
        in_file = value_of(shipped.removesuffix(" in `deploy.yaml`")) if shipped else value
        return cls(key.strip("`"), value, in_file, allowed)


@dataclass
class Probes:
    """Values to try."""

    accepted: list[Any] = field(default_factory=list)
    refused: list[Any] = field(default_factory=list)
    words: set[str] = field(default_factory=set)  # all there are, where there are words to choose from

    @property
    def has_switch(self) -> bool:
        return any(isinstance(each, bool) for each in self.accepted)

    @property
    def has_fraction(self) -> bool:
        return any(isinstance(each, float) for each in self.accepted)

    def _add_words(self, told: str) -> None:
        accepted, refused = WORDS[told]
        self.accepted += accepted
        self.refused += refused

    def _add_range(self, told: str, siblings: Mapping[str, Any]) -> None:
        def bound(text: str) -> Any:
            return siblings[text.strip("`")] if text.startswith("`") else value_of(text)

        is_open = told.startswith("above ")
        first, _, last = told.removeprefix("above ").removesuffix(" or more").partition(" to ")
        low, high = bound(first), bound(last) if last else None
        is_whole = isinstance(low, int) and isinstance(high, int | None)
        self.accepted.append(math.nextafter(low, math.inf) if is_open else low)
        self.refused.append(low if is_open else low - 1 if is_whole else math.nextafter(low, -math.inf))
        if is_whole:
            self.refused.append(low + 0.5)
        if high is not None:
            self.accepted.append(high)
            if high != math.inf:
                self.refused.append(high + 1 if is_whole else math.nextafter(high, math.inf))

    def _add_values(self, told: str) -> None:
        for each in map(value_of, told.split(", ")):
            self.accepted.append(each)
            if isinstance(each, str):
                self.words.add(each)
            if isinstance(each, str | bool):
                self.refused.append(NONE_OF_THEM)
            elif each is not None:
                self.refused.append(each - 1)

    @classmethod
    def of(cls, allowed: str, siblings: Mapping[str, Any]) -> Probes:
        """siblings: defaults of settings that a bound may name."""
        probes = cls()
        for alternative in allowed.split("; "):
            told = _without_remark(alternative)
            if told in WORDS:
                probes._add_words(told)
            elif re.search(r"^above | to | or more$", told):
                probes._add_range(told, siblings)
            else:
                probes._add_values(told)
        return probes


def value_of(text: str) -> Any:
    """As YAML reads it."""
    return yaml.safe_load(_without_remark(text).strip("`"))


def _without_remark(text: str) -> str:
    return re.sub(r" \([^)]*\)$", "", text)
