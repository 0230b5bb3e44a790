"""`python -m k8s`: write what is derived from deploy.yaml and kustomize, or check all of it."""

from __future__ import annotations

import argparse
import subprocess
import sys

from cache.errors import ServingError
from k8s.check import check_all
from k8s.places import PLACES, can_build, kept_text
from k8s.promql import has_promtool, write_expressions

DESCRIPTION = """\
check   validates every overlay and example without a cluster; prints what is wrong, exits 1 if anything is.
write   writes each overlay's serve-config.yaml from deploy.yaml, then the kept copies with kubectl, and
        keeps the alerts' and the dashboard's expressions once promtool has accepted them.
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m k8s", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("check", "write"))
    command = parser.parse_args(argv).command
    try:
        return _check() if command == "check" else _write()
    except ServingError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2


def _check() -> int:
    findings = list(check_all())
    for each in findings:
        sys.stderr.write(f"{each}\n")
    if not findings:
        built = (
            "built and checked"
            if can_build()
            else "checked as kept (no kubectl with kustomize 5 is installed)"
        )
        sys.stdout.write(f"k8s: {', '.join(PLACES)} {built}\n")
    return 1 if findings else 0


def _write() -> int:
    for place in PLACES.values():
        if place.settings:
            (place.folder / "serve-config.yaml").write_text(place.patch())
    if not can_build():
        sys.stderr.write(
            "no kubectl with kustomize 5 is installed: rendered/ is as it was, and `check` will say so\n"
        )
        return 1
    for place in PLACES.values():
        place.kept.parent.mkdir(exist_ok=True)
        try:
            place.kept.write_text(kept_text(place))
        except subprocess.CalledProcessError as error:
            sys.stderr.write(f"{place.name}: {error.stderr}")
            return 2
    if not has_promtool():
        sys.stderr.write(
            "no promtool is installed: expressions are as they were; `check` tells if they changed\n"
        )
        return 0
    refused = write_expressions()
    for each in refused:
        sys.stderr.write(f"{each}\n")
    return 2 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
