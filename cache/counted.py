"""Counts in sentences: "1 replica", "4 replicas". For what any part tells a user.

Knows nouns whose plural ends in s; nothing of what is counted.
"""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """count: shown with commas between thousands. noun: in the singular."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
