# SPDX-License-Identifier: Apache-2.0
"""Leases of jobs that continue a checkpoint: what they take over, and why they are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from checkpoint_rig import CHECKPOINTS, JOB_NETWORK, Site, nodes, saved
from controller_lab import identity, request

from vhpc_slurm.config import Config
from vhpc_slurm.config.checkpoint import Checkpoint
from vhpc_slurm.config.disks import Disks
from vhpc_slurm.controller.wire_types import LeaseWire
from vhpc_slurm.errors import FabricError, UserError
from vhpc_slurm.model import CheckpointState, HetPlace, InUse, KeeperState, Lease, LeaseState, Removed
from vhpc_slurm.options import BatchPlace

pytest_plugins = ["checkpoint_sites"]


@pytest.fixture
def site_config() -> Config:
    return Config(network=JOB_NETWORK, disks=Disks(max_mib=4096), checkpoint=CHECKPOINTS)


@pytest.fixture
def origin(site: Site) -> Lease:
    """A job that was saved as ``a``, and has ended."""
    lease = site.open(request(7, work_dir="/scratch/run", disk_mib=512), nodes(), identity(300))
    site.save(lease, "a")
    site.end(lease)
    return lease


def test_a_lease_has_what_its_guests_consist_of(site: Site, origin: Lease) -> None:
    lease = site.resume(8, "a", nodes("n3", "n4"), work_dir="/home/alice/other", timeout_s=77)
    assert (lease.state, lease.refusal) == (LeaseState.READY, "")
    assert lease.image == origin.image
    asked = lease.request
    assert (asked.image, asked.work_dir, asked.disk_mib) == (origin.request.image, "/scratch/run", 512)
    assert (asked.job_id, asked.resume, asked.timeout_s) == (8, "a", 77)
    old, new = origin.segment, lease.segment
    assert old is not None
    assert new is not None
    assert (new.ipv4, new.ipv6, new.mtu, new.mac_vni) == (old.ipv4, old.ipv6, old.mtu, old.vni)
    assert new.vni != old.vni
    assert new.underlay == ("192.0.2.3", "192.0.2.4")
    assert lease.resume is not None
    assert (lease.resume.name, lease.resume.origin, lease.resume.key) == ("a", origin.generation, b"")
    assert [node.node for node in lease.resume.nodes] == ["n1", "n2"]
    assert site.store.get(lease.generation) == replace(site.store.of_job(8)[0], lease=lease)
    # PrologSlurmctld may run again
    assert site.resume(8, "a", nodes("n3", "n4"), work_dir="/home/alice/other", timeout_s=77) == lease


def test_guests_keep_their_addresses_when_they_are_saved_again(site: Site, origin: Lease) -> None:
    lease = site.resume(8, "a", nodes())
    site.save(lease, "b")
    site.end(lease)
    third = site.resume(9, "b", nodes())
    assert origin.segment is not None
    assert third.segment is not None
    assert third.segment.mac_vni == origin.segment.vni


def test_a_node_that_takes_the_lease_gets_the_key_and_its_guests(site: Site, origin: Lease) -> None:
    lease = site.resume(8, "a", nodes("n3", "n4"))
    packed = LeaseWire.pack(lease)
    assert packed.resume is not None
    assert packed.resume.key == b""
    assert packed.brief().resume is None
    secret = site.ledger.secret(lease, "n4")
    assert secret is not None
    assert len(secret.key) == 32
    assert secret.nodes == (replace(saved("n1", 0), guests=()), saved("n2", 1))
    assert site.ledger.secret(origin, "n1") is None


def refusal(site: Site, name: str = "a", job_id: int = 8, *where: str, **other: Any) -> str:
    shape = {key: other.pop(key) for key in ("cpus", "memory_mib") if key in other}
    lease = site.resume(job_id, name, nodes(*where, **shape), **other)
    assert (lease.state is LeaseState.REFUSED) == bool(lease.refusal)
    assert (lease.resume is None) == bool(lease.refusal)
    return lease.refusal


def test_a_name_that_is_unknown_or_of_another_user_is_refused(site: Site, origin: Lease) -> None:
    assert "there is no checkpoint b of yours" in refusal(site, "b")
    assert "there is no checkpoint a of yours" in refusal(site, "a", 9, uid=2002)


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({"cpus": 3}, "needs 2 CPUs on n1, in place of n1; the job has 3 there"),
        ({"memory_mib": 4096}, "needs 2048 MiB of memory on n1, in place of n1; the job has 4096 MiB there"),
        ({"gid": 5}, "is of a job with the group id 2001, this job has 5"),
        ({"disk_mib": 1024}, "submit the job without --vhpc-disk"),
        ({"guests_per_node": 2}, "submit the job without --vhpc-guests-per-node"),
        ({"network": "none"}, "submit the job without --vhpc-network"),
        ({"het": HetPlace(8, 0, 2)}, "a heterogeneous job cannot continue checkpoint a"),
    ],
)
def test_another_shape_or_option_is_refused(
    site: Site, origin: Lease, other: dict[str, Any], line: str
) -> None:
    assert line in refusal(site, **other)


def test_another_number_of_nodes_is_refused(site: Site, origin: Lease) -> None:
    assert "has guests of 2 nodes, the job has 1 (ask for --nodes=2)" in refusal(site, "a", 8, "n1")


def test_an_option_with_the_same_value_is_no_difference(site: Site, origin: Lease) -> None:
    assert refusal(site, disk_mib=512) == ""


def test_a_checkpoint_that_is_not_valid_is_refused(site: Site) -> None:
    lease = site.open(request(7), nodes())
    made = site.ledger.begin(7, "a", stop=False, uid=2001)
    assert "is not complete: job 7 is being saved" in refusal(site)
    site.say(lease.generation, "n1", KeeperState.FAILED, made.serial, "step 5 runs")
    assert "checkpoint a has failed: n1: step 5 runs" in refusal(site, "a", 9)
    done = site.save(lease, "a")
    site.ledger.begin(7, "a", stop=False, uid=2001)
    site.end(lease)
    assert refusal(site, "a", 10) == "", "the newest that is valid"
    site.layer.lifecycle.end_job(10, None)
    site.layer.removal.remove([done.name], 2001)
    assert site.state(done.serial) is CheckpointState.REMOVED
    assert "checkpoint a has failed: the job has ended" in refusal(site, "a", 11)


def test_the_job_that_was_saved_must_have_ended(site: Site) -> None:
    lease = site.open(request(7), nodes())
    site.save(lease, "a")
    assert "job 7 runs still" in refusal(site, "a", 8, "n3", "n4")
    site.end(lease)
    assert refusal(site, "a", 9, "n3", "n4") == ""


def test_a_job_that_ends_with_its_checkpoint_need_not_be_over(site: Site) -> None:
    """Its guests are never started again, and Slurm takes a while to end a job."""
    site.save_and_stop(7, "a")
    assert refusal(site, "a", 8, "n3", "n4") == ""


def test_only_one_job_continues_a_checkpoint(site: Site, origin: Lease) -> None:
    lease = site.resume(8, "a", nodes())
    assert "job 8 continues checkpoint a already" in refusal(site, "a", 9, "n3", "n4")
    serial = lease.resume.serial if lease.resume else 0
    done = site.layer.removal.remove(["a"], 2001)
    assert done == Removed(in_use=(InUse("a", "job 8 continues it"),))
    site.end(lease)
    other = site.resume(10, "a", nodes("n3", "n4"))
    found = site.store.checkpoints.get(serial)
    assert found is not None
    assert found.resumed_by == other.generation


def test_a_requeued_job_continues_it_again(site: Site, origin: Lease) -> None:
    first = site.resume(8, "a", nodes())
    second = site.resume(8, "a", nodes("n3", "n4"), restart=1)
    assert (second.state, second.generation.restart) == (LeaseState.READY, 1)
    assert site.store.state(first.generation) is not LeaseState.READY
    assert site.layer.removal.remove(["a"], None).in_use == (InUse("a", "job 8 continues it"),)


def test_a_refused_job_does_not_keep_others_from_it(site: Site, origin: Lease) -> None:
    assert refusal(site, "a", 8, cpus=5)
    assert refusal(site, "a", 9) == ""


def test_a_lost_checkpoint_stops_the_boot(site: Site, origin: Lease) -> None:
    lease = site.resume(8, "a", nodes())
    with site.store.transaction():
        site.store.checkpoints.delete(lease.resume.serial if lease.resume else 0)
    with pytest.raises(FabricError, match="is gone"):
        site.ledger.secret(lease, "n1")


def test_the_next_run_of_a_requeued_job_continues(site: Site) -> None:
    lease = site.open(request(7, work_dir="/scratch/run"), nodes())
    made = site.save(lease, requeue=True)
    site.save_and_stop(8, "other")
    site.end(lease)
    again = site.resume(7, "", nodes("n3", "n4"), restart=1, image=lease.request.image, resume=None)
    assert (again.state, again.refusal, again.image) == (LeaseState.READY, "", lease.image)
    assert again.resume is not None
    assert (again.resume.serial, again.resume.origin) == (made.serial, lease.generation)
    assert again.request.work_dir == "/scratch/run"
    # PrologSlurmctld may run again
    asked = request(7, 1, image=lease.request.image, work_dir="/scratch/run")
    record = site.layer.opening.find(asked, nodes("n3", "n4"))
    assert record is not None
    assert record.lease == again


def test_a_requeued_job_continues_its_last_run(site: Site, origin: Lease) -> None:
    """Also one that has continued another job's checkpoint at first."""
    first = site.resume(8, "a", nodes())
    site.save(first, requeue=True)
    second = site.resume(8, "a", nodes(), restart=1)
    newest = site.save(second, requeue=True)
    third = site.resume(8, "a", nodes(), restart=2)
    assert third.resume is not None
    assert (third.resume.serial, third.resume.origin) == (newest.serial, second.generation)


def test_only_an_earlier_run_that_was_requeued_is_continued(site: Site) -> None:
    lease = site.open(request(7), nodes())
    opening = site.layer.opening
    site.save(lease)
    assert opening.own(request(7, 1), nodes()) is None, "its user has not asked to continue it"
    made = site.save(lease, requeue=True)
    assert opening.own(request(7, 0), nodes()) is None, "the run that is saved"
    found = opening.own(request(7, 1), nodes())
    assert not isinstance(found, UserError | None)
    assert found.serial == made.serial
    assert opening.own(request(7, 1, uid=2002), nodes()) is None
    other = opening.own(request(7, 1), nodes(cpus=3))
    assert isinstance(other, UserError)
    assert "needs 2 CPUs on n1" in other.line()
    site.end(lease)
    site.layer.removal.remove([made.name], 2001)
    assert opening.own(request(7, 1), nodes()) is None, "the checkpoint was removed"


@pytest.mark.parametrize("words", ["every:5m", "limit", "preempt"])
def test_a_job_that_saves_itself_continues_its_last_checkpoint(site: Site, words: str) -> None:
    """Also one that its user has made of the job, without a requeue."""
    site.config = Config(network=JOB_NETWORK, checkpoint=Checkpoint(folder="/ck"))
    site.start()
    lease = site.open(request(7, checkpoint=words), nodes())
    site.save(lease)
    newest = site.save(lease)
    found = site.layer.opening.own(request(7, 1, checkpoint=words), nodes())
    assert not isinstance(found, UserError | None)
    assert found.serial == newest.serial
    assert site.layer.opening.own(request(7, 1, checkpoint="none"), nodes()) is None


def test_a_continued_job_continues_its_last_checkpoint(site: Site, origin: Lease) -> None:
    first = site.resume(8, "a", nodes())
    newest = site.save(first)
    again = site.resume(8, "a", nodes(), restart=1)
    assert again.resume is not None
    assert (again.resume.serial, again.resume.origin) == (newest.serial, first.generation)


@pytest.mark.parametrize(
    ("folder", "other", "line"),
    [
        ("", {}, "this site has no folder for checkpoints"),
        ("/ck", {"batch": BatchPlace.HOST}, "its batch script runs outside of its guests"),
        ("/ck", {}, ""),
    ],
)
def test_a_job_that_cannot_be_saved_by_itself_is_refused(
    site: Site, folder: str, other: dict[str, Any], line: str
) -> None:
    site.config = Config(network=JOB_NETWORK, checkpoint=Checkpoint(folder=folder))
    site.start()
    lease = site.open(request(7, checkpoint="limit", **other), nodes())
    assert lease.state is (LeaseState.REFUSED if line else LeaseState.READY)
    assert line in lease.refusal
    assert site.open(request(8, checkpoint="none", **other), nodes()).state is LeaseState.READY
