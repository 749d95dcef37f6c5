# SPDX-License-Identifier: Apache-2.0
"""vhpc's messages to the kernel are those of ``ip``, and ``ip`` reads the kernel's answers as vhpc does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_hca import ETHERNET, IB, IGB, IPOIB, FakeRtnetlink, Interface, Port

from vhpc_slurm.node.devices import rtnetlink
from vhpc_slurm.node.devices.rtnetlink import (
    AUTO,
    DISABLE,
    LINK_STATE,
    NODE_GUID,
    PORT_GUID,
    SPOOFCHK,
    TRUST,
    Link,
)

NEEDS_IP = pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip of iproute2: apt install iproute2")
RECORDED = json.loads((Path(__file__).parents[3] / "data/rtnetlink/iproute2-6.1.0.json").read_text())
ANSWERED = json.loads((Path(__file__).parents[3] / "data/rtnetlink/linux-6.12-igb.json").read_text())
SAME = {
    "vf 3 node_guid 02:cd:10:12:00:00:01:00": rtnetlink.set_guid(NODE_GUID, 3, 0x02CD101200000100),
    "vf 3 port_guid 02:cc:10:12:00:00:01:00": rtnetlink.set_guid(PORT_GUID, 3, 0x02CC101200000100),
    "vf 3 state disable": rtnetlink.set_flag(LINK_STATE, 3, DISABLE),
    "vf 3 state auto": rtnetlink.set_flag(LINK_STATE, 3, AUTO),
    "vf 2 mac 02:00:00:00:00:07": rtnetlink.set_mac(2, bytes.fromhex("020000000007")),
    "vf 2 vlan 100": rtnetlink.set_vlan(2, 100),
    "vf 2 spoofchk on": rtnetlink.set_flag(SPOOFCHK, 2, 1),
    "vf 2 trust off": rtnetlink.set_flag(TRUST, 2, 0),
    "vf 2 min_tx_rate 0 max_tx_rate 0": rtnetlink.set_rate(2, 0, 0),
}


def kernel(tmp_path: Path) -> FakeRtnetlink:
    found = FakeRtnetlink(tmp_path / "netlink")
    found.interfaces[7] = Interface(IB, {n: Port() for n in range(4)}, IPOIB)
    return found


@pytest.mark.promise("vf.netlink")
@pytest.mark.parametrize("recorded", RECORDED, ids=lambda one: one["command"])
def test_requests_are_those_of_iproute2_to_the_byte(recorded: dict[str, str]) -> None:
    attribute = SAME[recorded["command"].removeprefix("ip link set dev lo ")]
    assert rtnetlink.set_request(1, attribute, 0).hex() == recorded["message"]


@NEEDS_IP
def test_the_fake_kernels_answers_match_iproute2(tmp_path: Path) -> None:
    fake = kernel(tmp_path)
    fake.interfaces[7].ports[3] = Port(state=2, node_guid=0x02CD101200000100, port_guid=0x02CC101200000100)
    fake.interfaces[8] = Interface(ETHERNET, {1: Port(bytes.fromhex("02aabbccdd01"), 100, 1, 0, 0)}, IGB)
    text = ""
    for index in (7, 8):
        text += _ip_reads(tmp_path, fake.newlink(index))
    assert re.search(r"vf 3 .*NODE_GUID 02:cd:10:12:00:00:01:00.*PORT_GUID 02:cc:10:12:00:00:01:00", text)
    assert re.search(r"vf 3 .*link-state disable", text)
    assert re.search(
        r"vf 1 .*02:aa:bb:cc:dd:01.*, vlan 100, spoof checking on, link-state auto, trust off", text
    )
    ours = rtnetlink.parse_vfs(fake.newlink(7)[16:])
    assert (ours[3].node_guid, ours[3].port_guid) == (0x02CD101200000100, 0x02CC101200000100)
    assert (ours[3].link_state, ours[3].spoofchk) == (DISABLE, None)
    (other,) = rtnetlink.parse_vfs(fake.newlink(8)[16:]).values()
    assert (other.mac.hex(":"), other.vlan, other.spoofchk, other.trust) == (
        "02:aa:bb:cc:dd:01",
        100,
        True,
        False,
    )


@NEEDS_IP
@pytest.mark.parametrize("answered", ANSWERED, ids=lambda one: one["state"])
def test_answers_of_a_kernel_are_read_as_by_iproute2(answered: dict[str, str], tmp_path: Path) -> None:
    raw = bytes.fromhex(answered["message"])
    ((kind, _, body),) = rtnetlink.messages(raw)
    found = rtnetlink.parse_vfs(body)
    assert (kind, sorted(found)) == (16, [0, 1, 2])
    given = "02:aa" in answered["state"]
    assert found[0].mac.hex(":") == ("02:aa:bb:cc:dd:01" if given else "00:00:00:00:00:00")
    assert [vf.vlan for vf in found.values()] == [100 if given else 0, 0, 0]
    assert {(vf.spoofchk, vf.trust, vf.link_state, vf.rate) for vf in found.values()} == {
        (True, False, AUTO, (0, 0))
    }
    assert {(vf.node_guid, vf.port_guid) for vf in found.values()} == {(None, None)}
    for number, line in enumerate(_ip_reads(tmp_path, raw).partition("vf 0")[2].split("vf ")[:3]):
        assert found[number].mac.hex(":") in line
        assert ("vlan 100" in line) == (found[number].vlan == 100)
        assert "spoof checking on, link-state auto, trust off" in line


def _ip_reads(tmp_path: Path, raw: bytes) -> str:
    (tmp_path / "log").write_bytes(raw)
    argv = ["ip", "-d", "monitor", "file", str(tmp_path / "log")]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout


def test_the_kernel_here_answers_and_refuses() -> None:
    index = int(Path("/sys/class/net/lo/ifindex").read_text())
    with Link(index) as link, pytest.raises(OSError, match="has no virtual function 0"):
        link.info(0)
    with Link(index) as link, pytest.raises(OSError, match=r"not supported|not permitted"):
        link.set(rtnetlink.set_vlan(0, 5))
    with Link(1 << 30) as link, pytest.raises(OSError, match="No such device"):
        link.info(0)


def test_a_truncated_answer_is_an_error(tmp_path: Path) -> None:
    whole = kernel(tmp_path).newlink(7)
    for size in range(len(whole)):
        rtnetlink.parse_vfs(whole[16:size])
        list(rtnetlink.messages(whole[:size]))
