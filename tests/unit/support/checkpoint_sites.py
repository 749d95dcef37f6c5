# SPDX-License-Identifier: Apache-2.0
"""A site that makes checkpoints, on each engine of the database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_rig import CHECKPOINTS, Site, nodes
from controller_lab import request as job_request
from store_backends import ENGINES, open_at, place

from vhpc_slurm.config import Config
from vhpc_slurm.model import Lease


@pytest.fixture
def site_config() -> Config:
    """The configuration of ``site``; modules have others."""
    return Config(checkpoint=CHECKPOINTS)


@pytest.fixture(params=ENGINES)
def site(request: pytest.FixtureRequest, tmp_path: Path, site_config: Config) -> Iterator[Site]:
    found = Site(open_at(place(request.param, tmp_path)), site_config)
    yield found
    found.store.close()


@pytest.fixture
def job(site: Site) -> Lease:
    """Job 7, which runs on two nodes."""
    return site.open(job_request(7), nodes())
