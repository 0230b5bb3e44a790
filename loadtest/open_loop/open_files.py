"""How many files a load's connections are, and whether this process may open them.

Each request on its way has a connection of its own, which is an open file. How many there will be at a time
depends on the server; that it answers nobody within a second is what is made sure of. Knows this process's
limits; opens nothing.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Sequence

from loadtest.open_loop.schedule import Arrival
from loadtest.placement.errors import BadRequest

AT_ONCE_S = 1.0
_OWN = 64  # files that are no connections, and connections that are idle


def most_at_once(arrivals: Sequence[Arrival]) -> int:
    """The most that are due within one second. arrivals: in order."""
    most = first = 0
    for index, arrival in enumerate(arrivals):
        while arrivals[first].due_s <= arrival.due_s - AT_ONCE_S:
            first += 1
        most = max(most, index - first + 1)
    return most


def check_files(arrivals: Sequence[Arrival]) -> None:
    """Before anything runs. Raises BadRequest where this process may not open as many files."""
    at_once = most_at_once(arrivals)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < at_once + _OWN:
        raise BadRequest(
            f"{at_once:,} requests are due within {AT_ONCE_S:g} s, each over a connection of its own: that "
            f"takes {at_once + _OWN:,} open files, and this process may have {hard:,}. Raise the limit "
            f"(`ulimit -n {at_once + _OWN}`), or send fewer"
        )


def make_room(arrivals: Sequence[Arrival]) -> None:
    """Raise this process's own limit, as far as it may, to where all of them can be on their way.

    Not to all that it may have: what it starts inherits that, and some make a table of as many entries.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(arrivals) + _OWN
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has a limit that it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
