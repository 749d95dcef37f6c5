# SPDX-License-Identifier: Apache-2.0
"""ssh keys of a generation: who gets them, when they are made, and when they are gone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from lease_keys import KeyVhpcd, take
from msgspec.structs import force_setattr
from network_lab import lease_of, running_of

from vhpc_slurm.config.network import Network
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.leases import ssh_keys
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import LeaseState, SshKeys
from vhpc_slurm.node.guest.channel import ChannelRefusedError
from vhpc_slurm.node.guest.wire import Op, Tag, fields_of
from vhpc_slurm.node.network import plan
from vhpc_slurm.node.resource.job_network import JobNetwork

JOB = Network(allowed=("none", "job"), default="job", vni_first=5000, vni_last=5099)
KEYS = SshKeys("SECRET-HOST", "ssh-ed25519 host", "SECRET-USER", "ssh-ed25519 user")
have_tool = pytest.mark.skipif(
    shutil.which("ssh-keygen", path=ssh_keys.SEARCH) is None, reason="apt install openssh-client"
)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[SshKeys]:
    """Keys that were made: each call makes others."""
    found: list[SshKeys] = []

    def make() -> SshKeys:
        found.append(SshKeys(f"HOST-{len(found)}", "host", f"USER-{len(found)}", "user"))
        return found[-1]

    monkeypatch.setattr(ssh_keys, "make", make)
    return found


# --- vhpcd ------------------------------------------------------------------------------------------------


def test_all_nodes_that_take_the_lease_get_the_same_keys(tmp_path: Path, made: list[SshKeys]) -> None:
    vhpcd = KeyVhpcd(tmp_path / "leases", JOB)
    vhpcd.open("n1", "n2", "n3")
    answers = vhpcd.run(take("n1"), take("n2"), take("n3"))
    assert [answer.ssh for answer in answers] == [made[0]] * 3
    assert len(made) == 1
    vhpcd.store.close()
    again = KeyVhpcd(tmp_path / "leases", JOB)
    assert again.run(take("n2"))[0].ssh == made[0], "after a restart, too"


@pytest.mark.promise("attack.ssh-keys")
def test_keys_are_in_no_list_and_in_no_look_at_the_lease(tmp_path: Path, made: list[SshKeys]) -> None:
    vhpcd = KeyVhpcd(tmp_path / "leases", JOB)
    lease = vhpcd.open("n1", "n2")
    vhpcd.run(take("n1"))
    look = wire.GetLease(job_id=42, restart=None, node="n1", wait_s=0.0)
    answers = vhpcd.run(look, wire.ListLeases(), wire.ListTimelines(), wire.AskStatus())
    said = b"".join(msgspec.json.encode(answer) for answer in answers) + repr(answers).encode()
    assert b"USER-" not in said
    assert b"HOST-" not in said
    assert "SECRET" not in repr(KEYS)
    record = vhpcd.alone.look(42, 0)
    assert record is not None
    assert record.lease == lease
    assert record.lease.ssh is None


@pytest.mark.promise("attack.ssh-keys")
@pytest.mark.parametrize("end", ["ended", "requeued", "pruned"])
def test_keys_are_deleted_when_the_generation_ends(tmp_path: Path, made: list[SshKeys], end: str) -> None:
    vhpcd = KeyVhpcd(tmp_path / "leases", JOB)
    lease = vhpcd.open("n1", "n2")
    vhpcd.run(take("n1"))
    assert vhpcd.secrets("ssh_key") == 1
    if end == "requeued":
        vhpcd.open("n1", "n2", restart=1)
    else:
        vhpcd.alone.end(42, None)
    assert vhpcd.secrets("ssh_key") == 0
    vhpcd.alone.leases.nodes.keep_ssh_keys(lease.generation, made[0])
    assert vhpcd.secrets("ssh_key") == 0, "a late request stores nothing"


def test_jobs_without_a_network_or_other_guests_have_no_keys(tmp_path: Path, made: list[SshKeys]) -> None:
    vhpcd = KeyVhpcd(tmp_path / "leases", JOB)
    vhpcd.open("n1", "n2", network="none")
    assert vhpcd.run(take("n1"))[0].ssh is None
    vhpcd.open("n1", restart=1)
    assert vhpcd.run(take("n1"))[0].ssh is None
    assert made == []
    vhpcd.open("n1", restart=2, guests_per_node=2)
    assert vhpcd.run(take("n1"))[0].ssh == made[0]


def test_a_host_without_ssh_keygen_starts_jobs_without_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_keys, "SEARCH", "/nonexistent")
    vhpcd = KeyVhpcd(tmp_path / "leases", JOB)
    vhpcd.open("n1", "n2")
    (answer,) = vhpcd.run(take("n1"))
    assert (answer.lease.state, answer.ssh) == (LeaseState.READY, None)
    with pytest.raises(FabricError, match="vhpcd's host has no ssh-keygen"):
        ssh_keys.make()


@have_tool
def test_the_keys_are_pairs_and_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = ssh_keys.make(), ssh_keys.make()
    assert list(tmp_path.iterdir()) == []
    assert len({first.host_key, first.user_key, second.host_key, second.user_key}) == 4
    for private, public in ((first.host_key, first.host_public), (first.user_key, first.user_public)):
        file = tmp_path / "key"
        file.write_text(private)
        file.chmod(0o600)
        derived = subprocess.run(["ssh-keygen", "-y", "-f", file], capture_output=True, text=True, check=True)
        assert derived.stdout.split()[:2] == public.split()[:2]
        assert public.startswith("ssh-ed25519 ")


# --- nodes ------------------------------------------------------------------------------------------------


class Guest:
    """A channel that notes requests, and refuses the ssh operation with an errno."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.asked: list[tuple[Op, bytes]] = []
        self.slots: tuple[tuple[str, int], ...] = ()

    def network(self, *_: object, slots: Any) -> None:
        self.slots = slots

    def ask(self, op: Op, body: bytes, _timeout_s: float) -> bytes:
        self.asked.append((op, body))
        if self.number:
            raise ChannelRefusedError("guest operation ssh failed", self.number)
        return b""


def configured(guest: Guest, keys: SshKeys | None) -> None:
    lease = lease_of(1, 5000, "n1", "n2")
    force_setattr(lease, "ssh", keys)
    JobNetwork().configure(lease, running_of(lease, "n2").guests[0], cast(Any, guest), 5.0)


def test_a_guest_gets_the_keys_and_their_owner() -> None:
    guest = Guest()
    configured(guest, KEYS)
    ((op, body),) = guest.asked
    fields = dict(fields_of(body))
    assert op is Op.SSH
    assert fields[Tag.HOST_KEY] == b"SECRET-HOST"
    assert fields[Tag.USER_PUBLIC] == b"ssh-ed25519 user"
    assert int.from_bytes(fields[Tag.USER_UID], "little") == 2001


@pytest.mark.parametrize("number", [38, 98])
def test_a_guest_that_cannot_serve_ssh_runs_its_job(number: int) -> None:
    configured(Guest(number), KEYS)


def test_a_guest_without_keys_gets_no_request() -> None:
    guest = Guest()
    configured(guest, None)
    assert guest.asked == []


def test_slots_are_the_cpus_of_each_guest() -> None:
    lease = lease_of(1, 5000, "n1", "n2", each=2)
    assert plan.slots(lease) == (("n1-g0", 1), ("n1-g1", 1), ("n2-g0", 1), ("n2-g1", 1))
    guest = Guest()
    configured(guest, None)
    assert guest.slots == (("n1", 2), ("n2", 2))
