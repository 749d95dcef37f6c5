# SPDX-License-Identifier: Apache-2.0
"""How checkpoints are asked for, made, given up, and removed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_rig import NODES, Site, nodes, saved
from controller_lab import allocation, request
from store_backends import open_at, place

from vhpc_slurm.config import Config
from vhpc_slurm.config.checkpoint import Checkpoint
from vhpc_slurm.controller.leases.checkpoints import Timed
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import (
    CheckpointState,
    Generation,
    HetPlace,
    InUse,
    KeeperReport,
    KeeperState,
    Lease,
    LeaseState,
    NetworkIdentity,
    OrderKind,
    SavedNode,
)
from vhpc_slurm.options import BatchPlace

pytest_plugins = ["checkpoint_sites"]

S, K, Do = CheckpointState, KeeperState, OrderKind


def test_all_nodes_hold_then_save_then_continue(site: Site, job: Lease) -> None:
    made = site.ledger.begin(7, "a", stop=False, uid=2001)
    assert (made.name, made.uid, made.state, len(made.key)) == ("a", 2001, S.HOLDING, 32)
    say = site.say
    assert say(job.generation, "n1", None) is Do.PREPARE
    assert say(job.generation, "n1", K.HELD, made.serial) is Do.WAIT
    assert say(job.generation, "n2", None) is Do.PREPARE
    assert site.state(made.serial) is S.HOLDING
    assert say(job.generation, "n2", K.HELD, made.serial) is Do.SAVE
    order = site.ledger.order(job.generation, KeeperReport(made.serial, K.HELD))
    assert (order.kind, order.name, order.key) == (Do.SAVE, "a", made.key)
    assert say(job.generation, "n1", K.SAVED, made.serial) is Do.WAIT
    assert say(job.generation, "n2", K.SAVED, made.serial) is Do.CONTINUE
    assert say(job.generation, "n1", K.SAVED, made.serial) is Do.CONTINUE
    assert site.state(made.serial) is S.VALID
    assert say(job.generation, "n1", K.CONTINUED, made.serial) is Do.WAIT
    assert site.store.checkpoints.saved(made.serial) == (saved("n1", 0), saved("n2", 1))
    assert site.store.checkpoints.saved(made.serial, "n2") == (saved("n2", 1),)


def test_the_longest_pause_of_a_node_is_kept(site: Site, job: Lease) -> None:
    def told(node: str, state: KeeperState, seconds: float | None, generation: Generation) -> None:
        site.ledger.ask(generation, node, KeeperReport(made.serial, state, paused_s=seconds))
        site.start()

    made = site.save(job)
    told("n1", K.CONTINUED, 2.25, job.generation)
    told("n2", K.CONTINUED, 3.5, job.generation)
    told("n1", K.CONTINUED, None, job.generation)
    told("n1", K.CONTINUED, 1.0, job.generation)
    other = site.open(request(8), nodes())
    told("n1", K.CONTINUED, 99.0, other.generation)
    found = site.store.checkpoints.get(made.serial)
    assert found is not None
    assert (found.paused_s, found.state) == (3.5, S.VALID)
    made = site.ledger.begin(7, "", stop=False, uid=None)
    told("n1", K.FAILED, 0.75, job.generation)
    told("n2", K.CONTINUED, 0.5, job.generation)
    found = site.store.checkpoints.get(made.serial)
    assert found is not None
    assert (found.paused_s, found.state) == (0.75, S.FAILED)


def test_only_an_order_to_save_has_the_key(site: Site, job: Lease) -> None:
    made = site.ledger.begin(7, "a", stop=False, uid=None)
    assert site.ledger.order(job.generation, None).key == b""
    assert made.key.hex() not in repr(made)


def test_a_job_that_is_to_end_is_ended_and_never_continues(site: Site, job: Lease) -> None:
    made = site.ledger.begin(7, "", stop=True, uid=2001)
    for node in NODES:
        site.say(job.generation, node, K.HELD, made.serial)
    last = KeeperReport(made.serial, K.SAVED, saved("n2", 1))
    first = KeeperReport(made.serial, K.SAVED, saved("n1", 0))
    assert site.ledger.ask(job.generation, "n1", first).ends is None
    ends = site.ledger.ask(job.generation, "n2", last).ends
    assert ends is not None
    assert (ends.serial, ends.requeue) == (made.serial, False)
    assert [one.serial for one in site.ledger.to_end()] == [made.serial]
    for state in (None, *K):
        assert site.say(job.generation, "n1", state, made.serial) is Do.END
    with pytest.raises(UserError, match="is being ended"):
        site.ledger.begin(7, "", stop=False, uid=2001)
    assert site.layer.removal.remove([made.name], 2001).in_use == (InUse("7.1", "job 7 is being ended"),)
    site.end(job)
    assert site.ledger.to_end() == ()
    assert site.say(job.generation, "n1", None) is Do.OVER
    # what holds guests still must not let them continue
    assert site.say(job.generation, "n1", K.SAVED, made.serial) is Do.END


def test_a_failure_of_one_node_lets_all_continue(site: Site, job: Lease) -> None:
    made = site.ledger.begin(7, "a", stop=True, uid=2001)
    site.say(job.generation, "n1", K.HELD, made.serial)
    assert site.say(job.generation, "n2", K.FAILED, made.serial, "step 5 runs") is Do.WAIT
    found = site.store.checkpoints.get(made.serial)
    assert found is not None
    assert (found.state, found.error) == (S.FAILED, "n2: step 5 runs")
    assert site.say(job.generation, "n1", K.HELD, made.serial) is Do.CONTINUE
    again = site.ledger.begin(7, "a", stop=False, uid=2001)
    assert site.say(job.generation, "n1", K.HELD, made.serial) is Do.CONTINUE
    assert site.say(job.generation, "n1", K.CONTINUED, made.serial) is Do.PREPARE
    assert site.state(again.serial) is S.HOLDING


def test_a_keeper_that_was_started_again_fails_the_checkpoint(site: Site, job: Lease) -> None:
    made = site.ledger.begin(7, "a", stop=False, uid=2001)
    for node in NODES:
        site.say(job.generation, node, K.HELD, made.serial)
    assert site.say(job.generation, "n1", None) is Do.WAIT
    assert site.state(made.serial) is S.FAILED
    assert site.say(job.generation, "n2", K.HELD, made.serial) is Do.CONTINUE


@pytest.mark.parametrize(
    "what",
    [None, saved("n1", 1), replace(saved("n2", 1), guests=()), saved("n2", 0)],
    ids=["nothing", "other-node", "no-guests", "other-guest"],
)
def test_a_report_without_all_guests_fails_it(site: Site, job: Lease, what: SavedNode | None) -> None:
    made = site.ledger.begin(7, "a", stop=False, uid=2001)
    for node in NODES:
        site.say(job.generation, node, K.HELD, made.serial)
    site.ledger.ask(job.generation, "n2", KeeperReport(made.serial, K.SAVED, what))
    assert site.state(made.serial) is S.FAILED


@pytest.mark.parametrize("size", [-1, 2**53, 2**64])
def test_a_file_of_an_impossible_size_fails_it(site: Site, job: Lease, size: int) -> None:
    made = site.ledger.begin(7, "a", stop=False, uid=2001)
    for node in NODES:
        site.say(job.generation, node, K.HELD, made.serial)
    what = saved("n2", 1)
    guest = replace(what.guests[0], disk=replace(what.guests[0].state, size=size))
    site.ledger.ask(job.generation, "n2", KeeperReport(made.serial, K.SAVED, replace(what, guests=(guest,))))
    found = site.store.checkpoints.get(made.serial)
    assert found is not None
    assert (found.state, found.error) == (S.FAILED, "n2: the report has an impossible size of a file")


@pytest.mark.parametrize("serial", [-1, 2**63])
def test_a_report_on_an_impossible_checkpoint_is_refused(site: Site, job: Lease, serial: int) -> None:
    """SQLite's integers have 64 bits."""
    with pytest.raises(FabricError, match="its checkpoint is out of range"):
        site.ledger.ask(job.generation, "n1", KeeperReport(serial, K.CONTINUED, paused_s=1.0))


def test_guests_that_do_not_stop_in_time_are_named(site: Site, job: Lease) -> None:
    made = site.ledger.begin(7, "a", stop=False, uid=2001)
    site.say(job.generation, "n2", K.HELD, made.serial)
    site.now += 179.0
    assert site.ledger.expire() == frozenset()
    site.now += 2.0
    assert site.ledger.expire() == {7}
    found = site.store.checkpoints.get(made.serial)
    assert found is not None
    assert found.error == "the guests on n1 were not stopped in 180 s"
    assert site.say(job.generation, "n2", K.HELD, made.serial) is Do.CONTINUE


def test_a_node_that_is_silent_while_it_saves_is_named(site: Site, job: Lease) -> None:
    made = site.ledger.begin(7, "a", stop=False, uid=2001)
    for node in ("n1", "n2"):
        site.say(job.generation, node, K.HELD, made.serial)
    for _ in range(100):  # slow storage is no fault
        site.now += 10.0
        assert site.say(job.generation, "n2", K.HELD, made.serial) is Do.SAVE
        assert site.say(job.generation, "n1", K.SAVED, made.serial) is Do.WAIT
        assert site.ledger.expire() == frozenset()
    site.now += 179.0
    assert site.say(job.generation, "n1", K.SAVED, made.serial) is Do.WAIT
    assert site.ledger.expire() == frozenset()
    site.now += 2.0
    assert site.ledger.expire() == {7}
    assert site.say(job.generation, "n1", K.SAVED, made.serial) is Do.CONTINUE
    found = site.store.checkpoints.get(made.serial)
    assert found is not None
    assert found.error == "n2: its keeper has not asked for orders for 180 s"


def test_a_started_vhpcd_goes_on_with_a_checkpoint(site: Site, job: Lease) -> None:
    made = site.ledger.begin(7, "a", stop=False, uid=2001)
    site.say(job.generation, "n1", K.HELD, made.serial)
    site.now += 100.0
    site.start()
    assert site.ledger.expire() == frozenset()
    site.now += 100.0
    assert site.say(job.generation, "n1", K.HELD, made.serial) is Do.WAIT
    assert site.say(job.generation, "n2", K.HELD, made.serial) is Do.SAVE


@pytest.mark.parametrize("held", [0, 2])
def test_the_end_of_the_job_fails_what_is_not_valid(site: Site, job: Lease, held: int) -> None:
    made = site.ledger.begin(7, "a", stop=True, uid=2001)
    for node in NODES[:held]:
        site.say(job.generation, node, K.HELD, made.serial)
    site.end(job)
    found = site.store.checkpoints.get(made.serial)
    assert found is not None
    assert (found.state, found.error) == (S.FAILED, "the job has ended")
    assert site.say(job.generation, "n1", K.HELD, made.serial) is Do.OVER
    assert site.state(made.serial) is S.FAILED


def test_a_requeued_job_is_another_one(site: Site, job: Lease) -> None:
    made = site.ledger.begin(7, "a", stop=False, uid=2001)
    later = site.open(request(7, 1), nodes())
    assert site.state(made.serial) is S.FAILED
    assert site.say(job.generation, "n1", None) is Do.OVER
    assert site.say(later.generation, "n1", K.HELD, made.serial) is Do.CONTINUE
    assert site.say(later.generation, "n1", None) is Do.WAIT


def test_the_last_two_of_a_job_are_kept(site: Site, job: Lease) -> None:
    made = [site.save(job) for _ in range(4)]
    assert [one.name for one in made] == ["7.1", "7.2", "7.3", "7.4"]
    assert [site.state(one.serial) for one in made] == [S.REMOVED, S.REMOVED, S.VALID, S.VALID]
    assert site.ledger.kept([one.serial for one in made] + [99]) == {made[2].serial, made[3].serial}
    assert site.ledger.kept([]) == frozenset()
    site.now += 8 * 86400.0
    site.ledger.prune()
    assert [one.serial for one in site.store.checkpoints.page(0)] == [made[2].serial, made[3].serial]
    assert site.save(job).serial == made[3].serial + 1


def test_a_request_that_is_repeated_begins_no_other(site: Site, job: Lease) -> None:
    first = site.ledger.begin(7, "a", stop=False, uid=2001)
    assert site.ledger.begin(7, "a", stop=False, uid=2001) == first
    assert site.ledger.begin(7, "", stop=False, uid=2001) == first
    for name, stop in (("b", False), ("a", True)):
        with pytest.raises(UserError, match="is being saved already: its checkpoint a is holding"):
            site.ledger.begin(7, name, stop=stop, uid=2001)


def test_a_job_without_its_keys_is_not_saved_yet(site: Site, job: Lease) -> None:
    record = site.store.newest(7)
    assert record is not None
    with site.store.transaction():
        site.store.put(replace(record, lease=replace(job, state=LeaseState.RESERVED)))
    with pytest.raises(UserError, match="the guests of job 7 do not boot yet"):
        site.ledger.begin(7, "a", stop=False, uid=2001)


def test_only_the_owner_and_root_save_a_job(site: Site, job: Lease) -> None:
    with pytest.raises(UserError, match="belongs to another user"):
        site.ledger.begin(7, "a", stop=False, uid=2002)
    with pytest.raises(UserError, match="does not run in guests"):
        site.ledger.begin(8, "a", stop=False, uid=2001)
    site.ledger.begin(7, "a", stop=False, uid=None)
    site.end(job)
    with pytest.raises(UserError, match="does not run in guests"):
        site.ledger.begin(7, "a", stop=False, uid=2001)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"het": HetPlace(7, 0, 2)}, "heterogeneous"),
        ({"batch": BatchPlace.HOST}, "--vhpc-batch=host"),
    ],
)
def test_jobs_without_a_script_in_guests_are_refused(site: Site, other: dict[str, Any], why: str) -> None:
    site.open(request(7, **other), nodes())
    with pytest.raises(UserError, match=why):
        site.ledger.begin(7, "", stop=False, uid=2001)


def test_a_site_without_a_folder_saves_no_job(site: Site, job: Lease) -> None:
    """Its nodes have no keepers, so nobody would stop the guests."""
    site.config = Config()
    site.start()
    with pytest.raises(UserError, match="this site has no folder for checkpoints"):
        site.ledger.begin(7, "a", stop=False, uid=2001)


def test_jobs_with_devices_are_refused(site: Site, job: Lease) -> None:
    site.open(request(8), allocation("n1"))
    lease = replace(job, network=NetworkIdentity("ufm", in_guests=True))
    record = site.store.get(job.generation)
    assert record is not None
    with site.store.transaction():
        site.store.put(replace(record, lease=lease))
    for number in (7, 8):
        with pytest.raises(UserError, match="devices of the hosts"):
            site.ledger.begin(number, "", stop=False, uid=2001)


def test_a_node_of_another_job_reports_nothing(site: Site, job: Lease) -> None:
    site.ledger.begin(7, "a", stop=False, uid=2001)
    with pytest.raises(FabricError, match="has no part on node n3"):
        site.ledger.ask(job.generation, "n3", None)
    assert site.ledger.order(Generation(9, 0, "00000001"), None).kind is Do.OVER


def test_a_request_is_repeated_only_with_the_same_end(site: Site, job: Lease) -> None:
    first = site.ledger.begin(7, "a", stop=False, requeue=True, uid=2001)
    assert (first.stop, first.requeue) == (True, True)
    assert site.ledger.begin(7, "a", stop=True, requeue=True, uid=2001) == first
    with pytest.raises(UserError, match="is being saved already"):
        site.ledger.begin(7, "a", stop=True, uid=2001)


def test_jobs_that_are_to_be_saved_are_found(site: Site) -> None:
    site.config = Config(checkpoint=Checkpoint(folder="/ck"))
    site.start()
    plain = site.open(request(7), nodes())
    none = site.open(request(8, checkpoint="none"), nodes())
    assert site.ledger.timed() == ()
    lease = site.open(request(9, checkpoint="limit"), nodes())
    assert site.ledger.timed() == (Timed(lease, (), None),)
    made = site.save(lease)
    written = site.store.checkpoints.saved(made.serial)
    assert site.ledger.timed() == (Timed(lease, written, made.created),)
    site.ledger.begin(9, "", stop=False, requeue=True, uid=None)
    assert site.ledger.timed() == ()  # it is being saved
    site.now += 1000
    assert site.ledger.expire() == {9}
    assert len(site.ledger.timed()) == 1  # tried again
    site.save(lease, stop=True)
    assert site.ledger.timed() == ()  # it is being ended
    for one in (plain, none, lease):
        site.end(one)


def test_a_site_that_encrypts_takes_nothing_else(tmp_path: Path) -> None:
    site = Site(open_at(place("sqlite", tmp_path)), Config(checkpoint=Checkpoint(folder="/ck", encrypt=True)))
    job = site.open(request(7), nodes())
    made = site.ledger.begin(7, "", stop=False, uid=None)
    for node in NODES:
        site.say(job.generation, node, K.HELD, made.serial)
    order = site.ledger.order(job.generation, KeeperReport(made.serial, K.HELD))
    assert (order.kind, order.encrypt) == (Do.SAVE, True)
    site.say(job.generation, "n1", K.SAVED, made.serial)
    found = site.store.checkpoints.get(made.serial)
    assert found is not None
    assert (found.state, found.error) == (
        S.FAILED,
        "n1: the node has not encrypted its guests (update its vhpc)",
    )
    site.store.close()
