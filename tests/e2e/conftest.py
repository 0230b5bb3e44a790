"""Deployments that modules share: `deployments.py` says which there are."""

from __future__ import annotations

from collections.abc import Iterator
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
