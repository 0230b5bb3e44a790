"""Deployments that modules share: `deployments.py` says which there are. What one has logged is shown where a
test of it fails: its folder is gone soon."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.e2e.deployments import Deployment
from tests.servers import Server, running_server


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where deployments may write."""
    return tmp_path_factory.mktemp("deployment")


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, shared_folder: Path) -> Iterator[Server]:
    """What the module says is `deployed`."""
    deployment: Deployment = request.param
    with running_server(**deployment.settings(shared_folder)) as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Server):
                report.sections += value.log_tails()
    return report
