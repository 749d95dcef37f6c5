# SPDX-License-Identifier: Apache-2.0
"""vhpcd as a process with the other backends: UFM, several OpenSM, VLANs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from controller_lab import Munged, wait_for
from fabric_lab import (
    DEFAULT,
    GUIDS,
    NOBODY,
    SimulatedFabric,
    holding,
    may_lose_packets,
    sets,
    unless_lost,
)
from fake_ufm import TOKEN, fake_ufm, settings_of
from vhpcd_fabric import HAVE_ALL, NEEDED, Ack, a_vhpcd, carries, fabric_of_its_own, opened, states

from vhpc_slurm.config.fabric import Manager, Subnet
from vhpc_slurm.errors import FabricError
from vhpc_slurm.model import LeaseState, NetworkIdentity

pytestmark = [pytest.mark.skipif(not HAVE_ALL, reason=NEEDED), pytest.mark.long, may_lose_packets]


fabric = fabric_of_its_own


def test_vhpcd_and_ufm_agree_after_any_fault(tmp_path: Path, daemon: Munged, fabric: SimulatedFabric) -> None:
    with (
        fake_ufm(tmp_path, fabric) as ufm,
        a_vhpcd(tmp_path, daemon, fabric, **settings_of(ufm, tmp_path)) as vhpcd,
    ):
        first = opened(vhpcd, 1, "n1", "n2")
        assert (first.state, first.network.pkey) == (LeaseState.READY, 0x1000)
        assert sets(fabric) == holding((0x1000, 2))
        vhpcd.client.lease(1, 0, "n1", 5.0)
        vhpcd.kill()
        ufm.fail("POST", 503, times=3)
        vhpcd.start()
        assert opened(vhpcd, 2).network.pkey == 0x1001
        assert sets(fabric) == holding((0x1000, 2), (0x1001, 1))
        # An operator takes a port away: the auditor sees it and has it put back.
        ufm.do("DELETE", "/resources/pkeys/0x1000/guids/02cc100000000100", None)
        # an audit that had just asked UFM sees it only in the port's table
        seen = (
            "UFM: key 0x1000 lacks 1 ports",
            "port 0x02cc100000000100 has the keys 0x7fff, and should have",
        )
        wait_for(lambda: any(line in vhpcd.log for line in seen), "the port is not missed")
        carries(fabric, holding((0x1000, 2), (0x1001, 1)))
        vhpcd.client.ending(1, 0)
        vhpcd.client.ending(2, 0)
        carries(fabric, holding((0x1000, 2)))
        vhpcd.client.acknowledge(Ack(first.generation, "n1"))
        carries(fabric, NOBODY)
        wait_for(lambda: set(states(vhpcd).values()) == {"quarantine"}, "not released")


def test_a_refused_ufm_token_blocks_jobs_until_replaced(
    tmp_path: Path, daemon: Munged, fabric: SimulatedFabric
) -> None:
    with (
        fake_ufm(tmp_path, fabric) as ufm,
        a_vhpcd(tmp_path, daemon, fabric, **settings_of(ufm, tmp_path)) as vhpcd,
    ):
        ufm.token = "a new one"
        with pytest.raises(FabricError, match="refuses the token"):
            opened(vhpcd, 1)
        assert sets(fabric) == NOBODY
        (tmp_path / "token").write_text("a new one\n")
        with pytest.raises(FabricError, match="has no token"):
            opened(vhpcd, 1)
        ufm.token = "another"
        (tmp_path / "token").write_text("another\n")
        assert opened(vhpcd, 1).state is LeaseState.READY
        assert TOKEN not in vhpcd.log


@pytest.mark.promise("fabric.standby")
def test_a_takeover_under_a_running_vhpcd_costs_no_job_its_key(
    tmp_path: Path, daemon: Munged, fabric: SimulatedFabric
) -> None:
    standby = fabric.start_standby("H16", DEFAULT)
    (tmp_path / "sm.toml").write_text(
        f'[fabric]\npartitions = "{standby.partitions}"\n'
        f'opensm_pidfile = "{standby.pidfile}"\nopensm_log = "{standby.log}"\n'
    )
    there = ("env", f"VHPC_CONFIG={tmp_path}/sm.toml", sys.executable, "-m", "vhpc_slurm.cli.main")
    here = Manager(partitions=str(fabric.partitions), pidfile=str(fabric.pidfile), log=str(fabric.log))
    subnet = Subnet(managers=(here, Manager(command=(*there, "fabric", "manager"))))
    with a_vhpcd(tmp_path, daemon, fabric, subnets=(subnet,), apply_timeout_s=10) as vhpcd:
        assert opened(vhpcd, 1, "n1", "n2").state is LeaseState.READY
        fabric.opensm.kill()
        fabric.opensm.wait()
        with unless_lost():  # the standby's question whether the master still runs
            wait_for(lambda: standby.says(b"SUBNET UP"), "the standby does not take over")
        assert opened(vhpcd, 2).state is LeaseState.READY
        expected = {
            guid: has for guid, has in holding((0x1000, 2), (0x1001, 1)).items() if guid in GUIDS[:15]
        }
        assert sets(fabric, *GUIDS[:15]) == expected
        vhpcd.client.ending(1, 0)
        vhpcd.client.ending(2, 0)
        wait_for(lambda: set(states(vhpcd).values()) == {"quarantine"}, "not released")
        assert all(has == {0x7FFF} for has in sets(fabric, *GUIDS[:15]).values())


def test_a_lease_has_its_vlan_and_the_next_another(tmp_path: Path, daemon: Munged) -> None:
    with a_vhpcd(tmp_path, daemon, None, backend="ethernet", vlan_first=100) as vhpcd:
        assert opened(vhpcd, 1).network == NetworkIdentity("ethernet", vlan=100, rails=1, vfs=1)
        vhpcd.client.ending(1, 0)
        wait_for(lambda: states(vhpcd) == {1: "quarantine"}, "not released")
        assert opened(vhpcd, 2).network.vlan == 101
