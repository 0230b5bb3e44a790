"""`python -m replica <command>`: what one engine can do without Ray and without a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cache.errors import ServingError
from replica import ask


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. An error of ours is one line, not a traceback."""
    parser = argparse.ArgumentParser(
        prog="python -m replica", description="One engine by itself: no Ray, no server, no network."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    ask.add_command(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except ServingError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
