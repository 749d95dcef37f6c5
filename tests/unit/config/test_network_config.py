# SPDX-License-Identifier: Apache-2.0
"""The table [network] of vhpc.toml, and the word of --vhpc-network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from controller_lab import allocation, identity, request
from segment_site import Site

from vhpc_slurm.config import Config
from vhpc_slurm.config.network import Network
from vhpc_slurm.controller.leases import rules
from vhpc_slurm.controller.wire_types import LeaseWire
from vhpc_slurm.errors import UserError
from vhpc_slurm.hooks import slurmctld
from vhpc_slurm.hooks.common import HookEnv
from vhpc_slurm.slurm.port import SlurmJob


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('default = "job"', "not in allowed"),
        ("allowed = []", "length >= 1"),
        ('allowed = ["job", "multicast"]', "Invalid enum value"),
        ('allowed = ["job"]\ndefault = "job,multicast"\nmulticast_guests = 0', "multicast_guests is 0"),
        ('allowed = ["bridge"]', "Invalid enum value"),
        ("port = 4789", "4789"),
        ("mtu = 1000", "IPv6 needs 1280"),
        ("vni_first = 9\nvni_last = 8", "range of 1 to 65536"),
        ("vni_first = 9\nvni_last = 9\nvni_reserved = [9]", "all of the pool"),
        ('ipv4 = "10.0.0.1/16"', "ipv4: 10.0.0.1/16 has host bits set"),
        ('ipv4 = "10.0.0.0/31"', "8 to 30 are expected"),
        ('ipv6 = "fd00::/48"', "64 are expected"),
        ('ipv6 = "x"', "ipv6:"),
        ('underlay = "ib0"', "contain {node}"),
        ('allowed = ["none", "nat"]\ndefault = "job,nat"', "job is not in allowed"),
        ('allowed = ["job,nat"]', "Invalid enum value"),
        ('nat_deny = ["10.0.0.1/8"]', "nat_deny: 10.0.0.1/8 has host bits set"),
        ('nat_allow = ["fd00::/8"]', "nat_allow:"),
        ('nat_dns = ["127.0.0.53"]', "no address that guests can reach"),
        ('nat_dns = ["dns.example.org"]', "nat_dns:"),
        ('nat_ipv4 = "10.201.0.0/30"', "at most 29"),
        ('nat_ipv4 = "10.200.3.0/24"', "overlaps ipv4"),
        ('passt = "passt"', "absolute path"),
        ('encryption = "ipsec"', "Invalid enum value"),
        (
            'encryption = "wireguard"\ntrusted_underlay = true',
            "trusted_underlay is for nodes without nftables",
        ),
        ('encryption = "wireguard"\nwireguard_port = 61441', "4096 identifiers need as many ports"),
        ('encryption = "wireguard"\nport = 24575', "one of those of WireGuard (20480 to 24575)"),
    ],
)
def test_a_table_that_cannot_work_is_refused_with_the_key(text: str, says: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="network") as caught:
        msgspec.toml.decode(f"[network]\n{text}\n", type=Config)
    assert says in str(caught.value)


def test_each_identifier_has_a_port_of_its_own_for_its_tunnels() -> None:
    site = Network(allowed=("job",), default="job", encryption="wireguard")
    assert [site.tunnel_port(vni) for vni in (100000, 100001, 104095)] == [20480, 20481, 24575]
    assert Network().tunnel_port(100001) == 0


def test_records_without_a_segment_are_read(tmp_path: Path) -> None:
    site = Site(tmp_path / "db", Network())
    old = site.open(1)
    body = msgspec.json.decode(msgspec.json.encode(LeaseWire.pack(old)))
    del body["segment"]
    assert msgspec.convert(body, LeaseWire).unpack() == replace(old, segment=None)
    assert rules.serves(site.service.reserve(request(1), allocation(), identity(0)), request(1), allocation())


def test_the_controller_checks_the_network_word_again(monkeypatch: pytest.MonkeyPatch) -> None:
    job = cast(
        SlurmJob,
        SimpleNamespace(
            uid=1, gid=1, user="a", work_dir="/", name="", partition="", het=None, account="", qos=""
        ),
    )
    env = HookEnv(7, 0, "")
    monkeypatch.setenv("SPANK_VHPC_IMAGE", "tiny:1")
    assert slurmctld._request(env, job).network is None
    for word in ("job", "none", "nat", "job,nat", "job,multicast", "job,multicast,nat"):
        monkeypatch.setenv("SPANK_VHPC_NETWORK", word)
        assert slurmctld._request(env, job).network == word
    monkeypatch.setenv("SPANK_VHPC_NETWORK", "nat,job")
    assert slurmctld._request(env, job).network == "job,nat", "the canonical form"
    for word in ("nat,nat", "Job", "job\n", "multicast"):
        monkeypatch.setenv("SPANK_VHPC_NETWORK", word)
        with pytest.raises(UserError, match=r"--vhpc-network='.*expected"):
            slurmctld._request(env, job)
