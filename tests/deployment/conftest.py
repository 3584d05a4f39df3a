"""Deployments that the tests of this folder share.

Fixtures of a package end with it only if they are defined in its folder; those of a plugin last to the end of the
session, and the programs of a deployment poll, which takes a quarter of a core.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.network import Deployment


@pytest.fixture(scope="package")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SuperLink and its sites as processes. After each test all services must be up and all nodes connected."""
    with Deployment(tmp_path_factory.mktemp("deployment")) as running:
        yield running


@pytest.fixture(scope="package")
def real_deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The same with Flower's own intervals."""
    with Deployment(tmp_path_factory.mktemp("deployment"), real_clocks=True) as running:
        yield running
