"""Which processes are taken for the proxies of a run folder, and that they are gone."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from deploy.proxy_processes import end_proxies


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program of HAProxy's name that takes any options, and waits."""
    path = tmp_path / "bin" / "haproxy"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\nread -r line\n")
    path.chmod(0o700)
    return path


@contextmanager
def running(*arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([str(each) for each in arguments], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_those_of_the_folder_are_ended_and_no_other(tmp_path: Path, program: Path) -> None:
    run_folder, other = tmp_path / "warmpath-1", tmp_path / "warmpath-12"
    with ExitStack() as stack:
        first, second, others, reader, inspected = (
            stack.enter_context(running(*each))
            for each in (
                (program, "-db", "-f", run_folder / "haproxy.cfg"),
                (program, "-db", "-f", run_folder / "node" / "haproxy.cfg", "-dS"),
                (program, "-db", "-f", other / "haproxy.cfg"),
                ("sh", "-c", "read -r line", "-f", run_folder / "haproxy.cfg"),
                (program, "-db", "-L", run_folder / "haproxy.cfg"),
            )
        )
        end_proxies(run_folder)
        assert [first.wait(5), second.wait(5)] == [-9, -9]
        assert [each.poll() for each in (others, reader, inspected)] == [None, None, None]


def test_without_any_it_is_done_at_once(tmp_path: Path) -> None:
    end_proxies(tmp_path, limit_s=0.0)
