# SPDX-License-Identifier: Apache-2.0
"""Keys of encrypted job networks: who gets them, when they are gone; what nodes refuse without them."""

from __future__ import annotations

import base64
import sys
from dataclasses import replace
from ipaddress import IPv6Address
from pathlib import Path
from typing import cast

import msgspec
import pytest
from controller_lab import allocation, identity, request
from hypothesis import given
from hypothesis import strategies as st
from lease_keys import KeyVhpcd, take
from network_lab import VNI, lease_of, plan_of

from vhpc_slurm.cli.host.checks import Level, services
from vhpc_slurm.cli.host.planview import _segment
from vhpc_slurm.config import Config
from vhpc_slurm.config.network import Network
from vhpc_slurm.controller.api import protocol as wire
from vhpc_slurm.controller.leases import tunnel_keys
from vhpc_slurm.controller.wire_types import LeaseWire, Wire
from vhpc_slurm.errors import FabricError, NodeError
from vhpc_slurm.model import Lease, LeaseState, NodeSegment, SshKeys, Tunnel, TunnelKeyPairs, TunnelKeys
from vhpc_slurm.node.network import firewall, plan, probe, segment, tools, tunnel
from vhpc_slurm.node.resource import job_network
from vhpc_slurm.node.resource.job_network import JobNetwork, NetworkData
from vhpc_slurm.node.store.journal import Journal
from vhpc_slurm.node.store.layout import Layout

SITE = Network(allowed=("none", "job"), default="job", vni_first=5000, vni_last=5099, encryption="wireguard")


def is_key(text: str) -> bool:
    return len(base64.b64decode(text, validate=True)) == 32


# --- vhpcd ------------------------------------------------------------------------------------------------


def test_each_node_gets_its_own_private_key_and_all_public_ones(tmp_path: Path) -> None:
    vhpcd = KeyVhpcd(tmp_path / "leases", SITE)
    lease = vhpcd.open("n1", "n2", "n3")
    assert lease.segment is not None
    assert lease.segment.tunnel_port == 20480
    answers = vhpcd.run(take("n1"), take("n2"), take("n3"))
    keys = [answer.tunnel for answer in answers]
    assert len({one.private_key for one in keys}) == len(set(keys[0].public_keys)) == 3
    assert {one.public_keys for one in keys} == {keys[0].public_keys}
    assert all(is_key(key) for one in keys for key in (one.private_key, *one.public_keys))
    vhpcd.store.close()
    again = KeyVhpcd(tmp_path / "leases", SITE)
    assert again.run(take("n2"))[0].tunnel == keys[1], "after a restart, too"


def test_public_keys_belong_to_the_private_ones() -> None:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    pairs = tunnel_keys.make(2)
    private = [X25519PrivateKey.from_private_bytes(base64.b64decode(key)) for key in pairs.private_keys]
    public = [X25519PublicKey.from_public_bytes(base64.b64decode(key)) for key in pairs.public_keys]
    assert private[0].exchange(public[1]) == private[1].exchange(public[0]), "two nodes agree on a secret"


@pytest.mark.promise("attack.tunnel-key")
def test_keys_are_in_no_list_and_in_no_look_at_the_lease(tmp_path: Path) -> None:
    vhpcd = KeyVhpcd(tmp_path / "leases", SITE)
    vhpcd.open("n1", "n2")
    (taken,) = vhpcd.run(take("n1"))
    look = wire.GetLease(job_id=42, restart=None, node="n1", wait_s=0.0)
    answers = vhpcd.run(look, wire.ListLeases(), wire.ListTimelines(), wire.AskStatus())
    said = b"".join(msgspec.json.encode(answer) for answer in answers) + repr(answers).encode()
    assert taken.tunnel.private_key.encode() not in said + repr(taken).encode()
    assert taken.tunnel.private_key.encode() in msgspec.json.encode(taken), "to the node it is sent"


@pytest.mark.promise("attack.tunnel-key")
@pytest.mark.parametrize("end", ["ended", "requeued"])
def test_keys_are_deleted_when_the_generation_ends(tmp_path: Path, end: str) -> None:
    vhpcd = KeyVhpcd(tmp_path / "leases", SITE)
    lease = vhpcd.open("n1", "n2")
    vhpcd.run(take("n1"))
    assert vhpcd.secrets("tunnel_key") == 1
    if end == "requeued":
        vhpcd.open("n1", "n2", restart=1)
    else:
        vhpcd.alone.end(42, None)
    assert vhpcd.secrets("tunnel_key") == 0
    assert vhpcd.alone.leases.nodes.keep_tunnel_keys(lease.generation, tunnel_keys.make(2)) is None
    assert vhpcd.secrets("tunnel_key") == 0, "a late request stores nothing"


def test_jobs_without_another_node_or_encryption_have_no_keys(tmp_path: Path) -> None:
    vhpcd = KeyVhpcd(tmp_path / "one", SITE)
    vhpcd.open("n1", guests_per_node=2)
    assert vhpcd.run(take("n1"))[0].tunnel is None
    plain = KeyVhpcd(tmp_path / "plain", msgspec.structs.replace(SITE, encryption="none"))
    lease = plain.open("n1", "n2")
    assert lease.segment is not None
    assert lease.segment.tunnel_port == 0
    assert plain.run(take("n1"))[0].tunnel is None
    assert (vhpcd.secrets("tunnel_key"), plain.secrets("tunnel_key")) == (0, 0)


def test_a_host_that_cannot_make_keys_gives_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = {name for name in sys.modules if name.split(".")[0] == "cryptography"}
    for name in {"cryptography", *imported}:
        monkeypatch.setitem(sys.modules, name, None)
    vhpcd = KeyVhpcd(tmp_path / "leases", SITE)
    vhpcd.open("n1", "n2")
    (answer,) = vhpcd.run(take("n1"))
    assert isinstance(answer, wire.Failure)
    assert (answer.kind, answer.hint) == ("fabric", "apt install python3-cryptography")
    assert answer.what == "vhpcd's host cannot make keys for network.encryption"
    (found,) = services.tunnel_keys(Config(network=SITE))
    assert (found.level, found.hint) == (Level.ERROR, "apt install python3-cryptography")


def test_a_lease_that_ends_meanwhile_has_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vhpcd = KeyVhpcd(tmp_path / "leases", SITE)
    vhpcd.open("n1", "n2")
    monkeypatch.setattr(vhpcd.alone.leases.nodes, "keep_tunnel_keys", lambda *_: None)
    (answer,) = vhpcd.run(take("n1"))
    assert isinstance(answer, wire.Failure)
    assert answer.what.endswith("is over")


# --- what older versions make of it -----------------------------------------------------------------------


class OldAnswer(Wire, frozen=True, tag="lease"):
    """wire.LeaseAnswer before there were tunnels."""

    lease: LeaseWire
    ssh: SshKeys | None = None


@pytest.mark.promise("net.wireguard-only")
def test_older_nodes_read_other_leases_and_refuse_encrypted_ones(tmp_path: Path) -> None:
    plain = KeyVhpcd(tmp_path / "plain", msgspec.structs.replace(SITE, encryption="none"))
    plain.open("n1", "n2")
    sent = msgspec.json.encode(plain.run(take("n1"))[0])
    assert msgspec.json.decode(sent, type=OldAnswer).lease.generation
    vhpcd = KeyVhpcd(tmp_path / "leases", SITE)
    vhpcd.open("n1", "n2")
    with pytest.raises(msgspec.ValidationError, match="unknown field `tunnel`"):
        msgspec.json.decode(msgspec.json.encode(vhpcd.run(take("n1"))[0]), type=OldAnswer)


def test_leases_of_an_older_vhpcd_are_not_encrypted() -> None:
    lease = lease_of(1, VNI, "n1", "n2")
    body = msgspec.json.decode(msgspec.json.encode(LeaseWire.pack(lease)))
    del body["segment"]["tunnel_port"]
    assert msgspec.convert(body, LeaseWire).unpack() == lease


# --- nodes ------------------------------------------------------------------------------------------------


def encrypted(*nodes: str, node: str = "n1", pairs: TunnelKeyPairs | None = None, version: int = 4) -> Lease:
    lease = lease_of(1, VNI, *nodes, tunnel_port=20480, version=version, mtu=1350)
    keys = pairs or tunnel_keys.make(len(nodes))
    return replace(lease, tunnel=keys.of(nodes.index(node)))


@given(st.integers(1, (1 << 24) - 1), st.integers(0, 2000))
def test_addresses_in_tunnels_are_of_one_job_only(vni: int, place: int) -> None:
    address = int(IPv6Address(plan.tunnel_address(vni, place)))
    assert address >> 64 == 0xFD76_6870_6377_0000
    assert (address >> 32 & 0xFFFFFFFF, address & 0xFFFFFFFF) == (vni, place + 1)


def test_a_node_knows_its_peers_by_key_and_address() -> None:
    pairs = tunnel_keys.make(3)
    lease = encrypted("n1", "n2", "n3", node="n2", pairs=pairs)
    own = plan_of(lease, "n2").segment
    assert own is not None
    assert own.tunnel == Tunnel("vhpcw5000", 20480, "fd76:6870:6377::1388:0:2")
    text = tunnel.render(own.tunnel, tunnel.keys(lease), tunnel.peers(lease, "n2"))
    assert text.splitlines() == [
        "[Interface]",
        f"PrivateKey = {pairs.private_keys[1]}",
        "ListenPort = 20480",
        "[Peer]",
        f"PublicKey = {pairs.public_keys[0]}",
        "Endpoint = 192.0.2.1:20480",
        "AllowedIPs = fd76:6870:6377::1388:0:1/128",
        "[Peer]",
        f"PublicKey = {pairs.public_keys[2]}",
        "Endpoint = 192.0.2.3:20480",
        "AllowedIPs = fd76:6870:6377::1388:0:3/128",
    ]
    six = encrypted("n1", "n2", version=6)
    assert "Endpoint = [2001:db8::2]:20480" in tunnel.render(
        own.tunnel, tunnel.keys(six), tunnel.peers(six, "n1")
    )
    vias = [one.via for one in plan.neighbours(lease, "n2")]
    assert vias == ["fd76:6870:6377::1388:0:1", "", "fd76:6870:6377::1388:0:3"]
    assert plan.peers(lease, "n2") == (vias[0], vias[2])
    assert "in WireGuard on UDP port 20480" in _segment(own)


def test_a_job_of_one_node_has_no_tunnel() -> None:
    found = plan_of(encrypted("n1"), "n1").segment
    assert found == NodeSegment(VNI, 7634, "192.0.2.1", "vhpcb5000", "vhpcx5000", mtu=1350)


@pytest.mark.promise("net.wireguard-only")
@pytest.mark.parametrize("what", ["none", "short", "few"])
def test_a_node_without_valid_keys_creates_no_network(what: str) -> None:
    pairs = tunnel_keys.make(2)
    wrong = {
        "none": None,
        "short": TunnelKeys(pairs.private_keys[0][1:], pairs.public_keys),
        "few": TunnelKeys(pairs.private_keys[0], pairs.public_keys[:1]),
    }[what]
    lease = replace(encrypted("n1", "n2"), tunnel=wrong)
    with pytest.raises(FabricError, match="vhpcd has sent no valid keys") as caught:
        tunnel.peers(lease, "n1")
    assert pairs.private_keys[0][1:20] not in caught.value.line()


@pytest.mark.promise("net.wireguard-only")
def test_a_node_that_demands_encryption_refuses_a_plain_segment() -> None:
    lease = lease_of(1, VNI, "n1", "n2")
    node = Layout(Config(network=SITE))
    with pytest.raises(FabricError, match=r"the network of 1\.0\.00000001 is not encrypted: .*vhpc\.toml"):
        JobNetwork().take(node, cast(Journal, None), lease, plan_of(lease, "n1"))


@pytest.mark.promise("net.wireguard-only")
def test_encrypted_networks_need_nftables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "find", lambda _program: None)
    monkeypatch.setattr(segment, "found", lambda *_: [])
    lease = encrypted("n1", "n2")
    with pytest.raises(NodeError, match="job networks need nftables"):
        segment.build(lease, plan_of(lease, "n1"), 1450, trusted_underlay=True)


def test_the_journal_has_the_firewalls_values_and_no_key() -> None:
    lease = encrypted("n1", "n2")
    found = plan_of(lease, "n1").segment
    assert found is not None
    peers = plan.peers(lease, "n1")
    data = msgspec.json.encode(NetworkData.of(found, peers))
    read = msgspec.json.decode(data, type=NetworkData)
    assert read.segment() == replace(found, mtu=0), "guests' interfaces are no part of the firewall"
    rules = firewall.render(lease.generation, read.segment(), read.peers)
    assert rules == firewall.render(lease.generation, found, peers)
    assert lease.tunnel is not None
    assert lease.tunnel.private_key not in data.decode() + repr(lease)
    assert 'oifname != "vhpcw5000" counter drop' in rules
    plain = plan_of(lease_of(1, VNI, "n1", "n2"), "n1").segment
    assert plain is not None
    assert "vhpcw" not in firewall.render(lease.generation, plain, ("192.0.2.2",))
    assert b"tunnel" not in msgspec.json.encode(NetworkData.of(plain, ()))


# --- doctor -------------------------------------------------------------------------------------------------


def test_doctor_tries_an_encrypted_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(what: str = "job") -> None:
        if what == "wireguard":
            raise NodeError("ip failed: link add name vhpcw1 type wireguard", "Unknown device type")

    monkeypatch.setattr(probe, "run", lacks)
    found = {one.check: one for one in JobNetwork().check(Config(network=SITE), "n1", root=True)}
    assert found["network.kernel"].level is Level.OK
    assert found["network.wireguard"].level is Level.ERROR
    assert "wireguard-tools" in found["network.wireguard"].hint
    plain = msgspec.structs.replace(SITE, encryption="none")
    assert "network.wireguard" not in {
        one.check for one in JobNetwork().check(Config(network=plain), "n1", root=True)
    }
    monkeypatch.setattr(probe, "run", lambda _what="job": None)
    assert job_network.wireguard().level is Level.OK


def test_doctor_checks_that_vhpcds_host_makes_keys() -> None:
    assert list(services.tunnel_keys(Config())) == []
    (found,) = services.tunnel_keys(Config(network=SITE))
    assert found.level is Level.OK


def test_ready_leases_only_have_tunnels(tmp_path: Path) -> None:
    vhpcd = KeyVhpcd(tmp_path / "leases", msgspec.structs.replace(SITE, exhausted="refuse", vni_last=5000))
    vhpcd.open("n1", "n2")
    vhpcd.alone.open(request(43), allocation("n1", "n2"), identity(0))
    refused = wire.GetLease(job_id=43, restart=None, node="n1", wait_s=1.0)
    (answer,) = vhpcd.run(refused)
    assert (answer.lease.state, answer.tunnel) == (LeaseState.REFUSED, None)


def test_the_peer_of_a_node_is_found_by_its_inner_address() -> None:
    """As wg(8) prints it, with the short form of an IPv6 address."""
    shown = (
        "eGFtcGxlLWtleS1vZi1uMi1pbi1iYXNlNjQtMDAwMDA=\tfd76:6870:6377::1388:0:2/128\n"
        "eGFtcGxlLWtleS1vZi1uMy1pbi1iYXNlNjQtMDAwMDA=\tfd76:6870:6377::1388:0:3/128\n"
        "eGFtcGxlLWtleS1vZi1uNC1pbi1iYXNlNjQtMDAwMDA=\t(none)\n"
    )
    found = tunnel.keys_of(shown, {"fd76:6870:6377:0:0:1388:0:3", "fd76:6870:6377:0:0:1388:0:9"})
    assert found == ("eGFtcGxlLWtleS1vZi1uMy1pbi1iYXNlNjQtMDAwMDA=",)
