# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in any order of events: the rules for each single case, and sequences of them."""

from __future__ import annotations

import functools
from itertools import product

import pytest
from checkpoint_machine import AnyOrder
from hypothesis import settings
from mariadb_server import HAVE_SERVER, WHY_NOT, emptied, shared
from store_backends import ME

from pace import examples
from vhpc_slurm.config.database import Database
from vhpc_slurm.controller.leases.checkpoint_rules import HOLDS, NOTHING, order, react
from vhpc_slurm.controller.store.mariastore import MariaStore
from vhpc_slurm.controller.store.port import LeaseStore
from vhpc_slurm.model import UNFINISHED, CheckpointState, KeeperState, OrderKind

REPORTS = (None, *KeeperState)
S, K = CheckpointState, KeeperState


class AnyOrderInMariadb(AnyOrder):
    def store(self) -> LeaseStore:
        return MariaStore(emptied(in_mariadb()), ME)


@functools.cache
def in_mariadb() -> Database:
    found = shared().database()
    MariaStore(found, ME).close()
    return found


AnyOrder.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)
TestAnyOrder = AnyOrder.TestCase
AnyOrderInMariadb.TestCase.settings = settings(
    max_examples=examples(4), stateful_step_count=30, deadline=None
)
TestAnyOrderInMariadb = pytest.mark.skipif(not HAVE_SERVER, reason=WHY_NOT)(AnyOrderInMariadb.TestCase)


def test_only_these_reports_bring_a_checkpoint_further() -> None:
    further = {
        (state, known, said, missing): react(state, known, said, missing).state
        for state, known, said, missing in product(S, (None, *HOLDS), REPORTS, (0, 1))
        if react(state, known, said, missing).store
    }
    assert further == {
        (S.HOLDING, None, K.PREPARED, 1): None,
        (S.HOLDING, None, K.PREPARED, 0): None,
        (S.HOLDING, K.PREPARED, K.HELD, 1): None,
        (S.HOLDING, K.PREPARED, K.HELD, 0): S.SAVING,
        (S.SAVING, K.HELD, K.SAVED, 1): None,
        (S.SAVING, K.HELD, K.SAVED, 0): S.VALID,
    }


def test_a_repeated_report_changes_nothing_all_others_fail_it() -> None:
    for state, known, said in product(UNFINISHED, (None, *HOLDS), REPORTS):
        found = react(state, known, said, 1, "why")
        if not found.store and said is not known:
            assert found.state is S.FAILED, (state, known, said)
            assert (said is K.FAILED) == (found.error == "why")
        if said is known:
            assert found == NOTHING


@pytest.mark.parametrize("state", [S.VALID, S.FAILED, S.REMOVED])
def test_reports_do_not_change_a_decided_checkpoint(state: CheckpointState) -> None:
    assert {react(state, known, said, 0) for known, said in product(REPORTS, REPORTS)} == {NOTHING}


def test_guests_continue_only_when_their_checkpoint_is_decided() -> None:
    both = (False, True)
    for state, said, stop, over, prepared in product((None, *S), REPORTS, both, both, both):
        kind = order(state, said, stop=stop, over=over, prepared=prepared)
        if kind is OrderKind.CONTINUE:
            assert said in HOLDS
            assert state not in UNFINISHED
            assert not over
            assert state is S.FAILED or state is None or not stop
        if kind is OrderKind.END:
            assert stop
            assert state in (S.VALID, S.REMOVED)
        if kind is OrderKind.SAVE:
            assert (state, said) == (S.SAVING, K.HELD)
        if kind is OrderKind.HOLD:
            assert (state, said, prepared) == (S.HOLDING, K.PREPARED, True)
        if kind is OrderKind.PREPARE:
            assert state is S.HOLDING
            assert said not in HOLDS
        if kind is OrderKind.OVER:
            assert over
