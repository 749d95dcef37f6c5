# SPDX-License-Identifier: Apache-2.0
"""Leases in any order of events, in MariaDB."""

from __future__ import annotations

import functools

import pytest
from hypothesis import settings
from lease_machine import AnyOrder
from mariadb_server import HAVE_SERVER, WHY_NOT, emptied, shared
from store_backends import ME

from pace import examples
from vhpc_slurm.config.database import Database
from vhpc_slurm.controller.store.mariastore import MariaStore
from vhpc_slurm.controller.store.port import LeaseStore


class AnyOrderInMariadb(AnyOrder):
    def store(self) -> LeaseStore:
        return MariaStore(emptied(in_mariadb()), ME)


@functools.cache
def in_mariadb() -> Database:
    found = shared().database()
    MariaStore(found, ME).close()
    return found


AnyOrderInMariadb.TestCase.settings = settings(
    max_examples=examples(5), stateful_step_count=30, deadline=None
)
TestAnyOrderInMariadb = pytest.mark.skipif(not HAVE_SERVER, reason=WHY_NOT)(AnyOrderInMariadb.TestCase)
