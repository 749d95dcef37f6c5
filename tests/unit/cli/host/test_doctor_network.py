# SPDX-License-Identifier: Apache-2.0
"""`vhpc doctor` on a node's job networks."""

from __future__ import annotations

import grp
import socket
from pathlib import Path

import pytest
from network_lab import usable

from vhpc_slurm.cli.host.checks import Level, services, underlay, vhost
from vhpc_slurm.config import Config, Guests
from vhpc_slurm.config.network import Network
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import HostInventory
from vhpc_slurm.node.network import forwarding, probe, segment, tools
from vhpc_slurm.node.resource import job_network, nat
from vhpc_slurm.node.resource.job_network import JobNetwork
from vhpc_slurm.node.resource.nat import Nat

JOB = Config(network=Network(allowed=("none", "job")))


def test_a_site_without_job_networks_has_no_findings() -> None:
    assert list(JobNetwork().check(Config(), "n1", root=True)) == []


@pytest.mark.skipif(bool(usable()), reason=usable())
def test_a_capable_kernel_is_tried_and_not_changed() -> None:
    before = tools.run("ip", "-o", "link")
    found = job_network.kernel()
    assert found.level is Level.OK, found
    assert tools.run("ip", "-o", "link").count("vhpc") == before.count("vhpc")


def test_missing_features_of_the_kernel_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks() -> None:
        raise NodeError("ip failed: link add name vhpcx1 type vxlan", "Unknown device type")

    monkeypatch.setattr(probe, "run", lacks)
    found = job_network.kernel()
    assert found.level is Level.ERROR
    assert "type vxlan: Unknown device type" in found.what


@pytest.mark.parametrize(("trusted", "level"), [(False, Level.ERROR), (True, Level.WARN)])
def test_missing_nftables_is_reported(monkeypatch: pytest.MonkeyPatch, trusted: bool, level: Level) -> None:
    monkeypatch.setattr(tools, "find", lambda _program: None)
    config = Config(network=Network(allowed=("job",), default="job", trusted_underlay=trusted))
    found = {one.check: one for one in JobNetwork().check(config, "n1", root=False)}
    assert found["network.firewall"].level is level
    assert found["network.kernel"].level is Level.WARN


def test_br_netfilter_that_is_not_loaded_is_ok(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tools, "SYSCTL", tmp_path)
    assert job_network.bridge_netfilter(accepts=True).level is Level.OK
    (tmp_path / "bridge").mkdir()
    for name in ("bridge-nf-call-iptables", "bridge-nf-call-ip6tables"):
        (tmp_path / "bridge" / name).write_text("0\n")
    assert job_network.bridge_netfilter(accepts=True).level is Level.OK


def test_rules_of_iptables_legacy_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """nftables does not show them."""
    monkeypatch.setattr(tools, "SYSCTL", tmp_path)
    (tmp_path / "bridge").mkdir()
    (tmp_path / "bridge/bridge-nf-call-iptables").write_text("1\n")
    names = tmp_path / "ip_tables_names"
    names.write_text("nat\nfilter\n")
    monkeypatch.setattr(forwarding, "LEGACY", names)
    found = job_network.bridge_netfilter(accepts=True)
    assert (found.level, "iptables-legacy" in found.what) == (Level.WARN, True)
    assert "sysctl -w net.bridge.bridge-nf-call-iptables=0; or accept" in found.hint


def test_the_underlay_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(underlay, "resolve", lambda name: frozenset({"127.0.1.1"}))
    assert underlay.underlay(JOB, socket.gethostname()).level is Level.WARN
    monkeypatch.setattr(underlay, "resolve", lambda name: frozenset({"192.0.2.77"}))
    found = underlay.underlay(JOB, "n1")
    assert found.level is Level.ERROR
    assert "does not have the underlay address 192.0.2.77" in found.what
    monkeypatch.setattr(segment, "underlay_mtu", lambda _segment: 1450)
    assert underlay.underlay(JOB, "n1").what == "192.0.2.77 leaves guests an MTU of 1450"
    large = Config(network=Network(allowed=("job",), default="job", mtu=8950))
    assert "network.mtu is 8950, and 192.0.2.77 leaves 1450" in underlay.underlay(large, "n1").what


def test_a_controller_without_ssh_keygen_gets_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert list(services.ssh_keygen(Config())) == []
    monkeypatch.setattr(services, "SEARCH", str(tmp_path))
    (found,) = services.ssh_keygen(JOB)
    assert (found.level, found.hint) == (Level.WARN, "apt install openssh-client")
    program = tmp_path / "ssh-keygen"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (found,) = services.ssh_keygen(JOB)
    assert found.level is Level.OK


# --- vhost-net ----------------------------------------------------------------------------------------

KVM = HostInventory("n1", "GenuineIntel", (), (), (), kvm=True, kvm_reason="")
TCG = HostInventory("n1", "GenuineIntel", (), (), (), kvm=False, kvm_reason="")


SITE = Network(
    allowed=("none", "site"), site_bridge="br0", site_ipv4="192.0.2.0/24", site_gateway="192.0.2.1"
)


@pytest.mark.parametrize("config", [JOB, Config(network=SITE)], ids=["job", "site"])
def test_a_node_with_kvm_and_without_vhost_net_gets_a_warning(tmp_path: Path, config: Config) -> None:
    device = tmp_path / "vhost-net"
    (found,) = vhost.check(config, KVM, root=True, device=device)
    assert (found.check, found.level) == ("network.vhost", Level.WARN)
    assert f"there is no {device}" in found.what
    assert found.hint.startswith("modprobe vhost_net, ")
    device.touch()
    (found,) = vhost.check(config, KVM, root=True, device=device)
    assert found.level is Level.OK


def test_a_vhost_net_that_does_not_open_gets_a_warning(tmp_path: Path) -> None:
    device = tmp_path / "vhost-net"
    device.mkdir()
    (found,) = vhost.check(JOB, KVM, root=True, device=device)
    assert f"{device} does not open: Is a directory" in found.what
    # only root can open the device
    (found,) = vhost.check(JOB, KVM, root=False, device=device)
    assert found.level is Level.OK


@pytest.mark.parametrize(
    ("config", "host"),
    [(Config(), KVM), (Config(network=Network(allowed=("nat",), default="nat")), KVM), (JOB, TCG)],
    ids=["no network", "nat", "no KVM"],
)
def test_vhost_net_is_not_checked_where_it_is_not_used(
    config: Config, host: HostInventory, tmp_path: Path
) -> None:
    assert list(vhost.check(config, host, root=True, device=tmp_path / "absent")) == []


# --- nat ----------------------------------------------------------------------------------------------

NAT = Config(network=Network(allowed=("none", "nat"), nat_dns=("192.0.2.1",)))


def test_a_site_without_nat_has_no_findings() -> None:
    assert list(Nat().check(JOB, "n1", root=True)) == []


@pytest.mark.parametrize(
    ("text", "level", "says"),
    [
        ("--vhost-user  Enable vhost-user mode", Level.OK, "can be used"),
        ("Usage: passt", Level.ERROR, "does not know --vhost-user"),
    ],
)
def test_passt_has_to_know_vhost_user(tmp_path: Path, text: str, level: Level, says: str) -> None:
    program = tmp_path / "passt"
    program.write_text(f"#!/bin/sh\necho '{text}' >&2\nexit 1\n")
    program.chmod(0o755)
    found = nat.passt(str(program))
    assert (found.level, says in found.what) == (level, True)
    assert nat.passt(str(tmp_path / "absent")).level is Level.ERROR


@pytest.mark.skipif(bool(usable()), reason=usable())
def test_the_packet_filter_of_nat_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tools.run("nft", "list", "tables")
    assert nat.packet_filter(root=True).level is Level.OK
    assert tools.run("nft", "list", "tables") == before
    assert nat.packet_filter(root=False).level is Level.WARN
    monkeypatch.setattr(tools, "find", lambda _program: None)
    assert nat.packet_filter(root=True).level is Level.ERROR


def test_groups_with_gids_of_guests_are_reported(tmp_path: Path) -> None:
    subgid = tmp_path / "subgid"
    guests = Guests(uid_base=5000, uid_count=10)
    groups = [grp.struct_group((name, "x", gid, [])) for name, gid in (("a", 4999), ("b", 5010))]
    assert nat.gids(guests, groups, subgid).level is Level.OK
    found = nat.gids(guests, [*groups, grp.struct_group(("c", "x", 5009, []))], subgid)
    assert found.level is Level.ERROR
    assert "c (5009) exist" in found.what
    subgid.write_text("alice:4000:1000\nbob:5010:9\n#\n")
    assert nat.gids(guests, groups, subgid).level is Level.OK
    subgid.write_text("alice:4000:1001\n")
    assert "alice:4000:1001 of" in nat.gids(guests, groups, subgid).what


def test_a_profile_of_apparmor_is_reported_with_a_hint(tmp_path: Path) -> None:
    assert list(nat.apparmor(NAT, tmp_path / "none")) == []
    profiles = tmp_path / "profiles"
    profiles.write_text("passt (complain)\n")
    assert list(nat.apparmor(NAT, profiles)) == []
    profiles.write_text("man_groff (enforce)\npasst (enforce)\n")
    (found,) = nat.apparmor(NAT, profiles)
    assert "owner /run/vhpc/** rw," in found.hint
