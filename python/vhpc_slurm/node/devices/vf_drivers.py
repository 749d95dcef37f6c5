# SPDX-License-Identifier: Apache-2.0
"""The VF drivers, and the choice of the one that a physical function needs.

=====================  =====================================================================
``NetlinkInfiniband``  mlx5 of Linux, by the IPoIB interface of the physical function
                       (drivers/infiniband/hw/mlx5/ib_virt.c)
``OfedInfiniband``     mlx5 of MLNX_OFED and DOCA: ``sriov/N/{node,port,policy}``, which query the firmware
``Mlx4``               ConnectX-3: GUID and partition keys are mapped by the host
                       (drivers/infiniband/hw/mlx4/sysfs.c)
``Ethernet``           every driver with ``ndo_set_vf_*``: MAC, VLAN, spoof check, trust, rate
=====================  =====================================================================
"""

from __future__ import annotations

import errno
import time

from vhpc_slurm.device import VfIdentity
from vhpc_slurm.node.devices import rtnetlink
from vhpc_slurm.node.devices.preflight import bound_to, device_path
from vhpc_slurm.node.devices.rtnetlink import (
    AUTO,
    DISABLE,
    LINK_STATE,
    NODE_GUID,
    PORT_GUID,
    SPOOFCHK,
    TRUST,
    Link,
    VfInfo,
)
from vhpc_slurm.node.devices.vf import PARKED_GUID, NoVfDriverError, VfDriver, colons
from vhpc_slurm.node.host import attribute, sysfs

ARPHRD_ETHER, ARPHRD_INFINIBAND = "1", "32"
PKEY_MASK = 0x7FFF
FULL = 0x8000
DEFAULT_PKEY = 0x7FFF
NO_MAC = bytes(6)
PORT = 1  # each port of an mlx5 adapter is a separate physical function; of mlx4 the first port is used


def find(root: str, address: str, timeout_s: float) -> VfDriver:
    """The VF driver of a virtual function.

    Raises:
        NoVfDriverError: its driver has no such interface.
    """
    path = device_path(root, address)
    pf = sysfs.link(f"{path}/physfn").rpartition("/")[2]
    pf_path = device_path(root, pf)
    number = _number(pf_path, address)
    if pf and number is not None:
        if sysfs.listing(f"{pf_path}/sriov/{number}"):
            return OfedInfiniband(f"{pf_path}/sriov/{number}", timeout_s)
        for name in sysfs.listing(f"{pf_path}/infiniband"):
            iov = f"{pf_path}/infiniband/{name}/iov"
            if sysfs.listing(f"{iov}/{address}/ports/{PORT}"):
                return Mlx4(iov, address, timeout_s)
        for kind, vf_driver in ((ARPHRD_INFINIBAND, NetlinkInfiniband), (ARPHRD_ETHER, Ethernet)):
            index = _interface(pf_path, kind)
            if index is not None:
                return vf_driver(index, number)
    raise NoVfDriverError(
        f"virtual function {address} cannot be set",
        f"its physical function {pf} with driver {bound_to(root, pf) or '(none)'} has no network interface",
        "for InfiniBand: modprobe ib_ipoib",
    )


def _number(pf_path: str, address: str) -> int | None:
    for number, link in sysfs.numbered(pf_path, "virtfn"):
        if sysfs.link(link).rpartition("/")[2] == address:
            return number
    return None


def _interface(pf_path: str, kind: str) -> int | None:
    """Number of the physical function's own interface; those of partitions have a parent."""
    for name in sysfs.listing(f"{pf_path}/net"):
        path = f"{pf_path}/net/{name}"
        if sysfs.text_or_empty(f"{path}/type") == kind and not sysfs.text_or_empty(f"{path}/parent"):
            index = sysfs.text_or_empty(f"{path}/ifindex")
            if index.isdecimal():
                return int(index)
    return None


class NetlinkInfiniband:
    """GUIDs and link policy, by the IPoIB interface of the physical function."""

    infiniband = True

    def __init__(self, index: int, number: int) -> None:
        self.index, self.number = index, number

    def _set(self, *attributes: bytes) -> None:
        with Link(self.index) as link:
            for one in attributes:
                link.set(one)

    def _info(self) -> VfInfo:
        with Link(self.index) as link:
            return link.info(self.number)

    def switch_off(self) -> None:
        """Set the port down, regardless of the cable."""
        self._set(rtnetlink.set_flag(LINK_STATE, self.number, DISABLE))

    def switch_on(self) -> None:
        """The port follows the physical one."""
        self._set(rtnetlink.set_flag(LINK_STATE, self.number, AUTO))

    def set(self, identity: VfIdentity) -> None:
        """Set both GUIDs: the node GUID must be unique, too."""
        self._set(
            rtnetlink.set_guid(NODE_GUID, self.number, identity.node_guid),
            rtnetlink.set_guid(PORT_GUID, self.number, identity.port_guid),
        )

    def difference(self, identity: VfIdentity) -> str:
        """Compare with the kernel's own copy (5.5 and later), not the firmware's."""
        info = self._info()
        return _guids(info.node_guid, info.port_guid, identity.node_guid, identity.port_guid) or _off(info)

    def park(self) -> None:
        """Set the parked GUIDs."""
        self.set(VfIdentity(PARKED_GUID, PARKED_GUID))

    def why_not_parked(self) -> str:
        """As ``difference``."""
        return self.difference(VfIdentity(PARKED_GUID, PARKED_GUID))


def _off(info: VfInfo) -> str:
    return "" if info.link_state == DISABLE else f"its link state is {info.link_state}, not {DISABLE}"


def _guids(node: int | None, port: int | None, wanted_node: int, wanted_port: int) -> str:
    for what, is_, wanted in (("node", node, wanted_node), ("port", port, wanted_port)):
        if is_ is None:
            return f"the kernel does not report its {what} GUID"
        if is_ != wanted:
            return f"its {what} GUID is {colons(is_)}, not {colons(wanted)}"
    return ""


class OfedInfiniband:
    """GUIDs and link policy, by files that only Mellanox's own drivers have."""

    infiniband = True

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path, self.timeout_s = path, timeout_s

    def _write(self, name: str, text: str) -> None:
        # older drivers compare including the newline
        attribute.write_attribute(f"{self.path}/{name}", f"{text}\n", self.timeout_s)

    def _read(self, name: str) -> str:
        return attribute.read_attribute(f"{self.path}/{name}", self.timeout_s)

    def switch_off(self) -> None:
        """Set the port down."""
        self._write("policy", "Down")

    def switch_on(self) -> None:
        """The port follows the physical one."""
        self._write("policy", "Follow")

    def set(self, identity: VfIdentity) -> None:
        """Set both GUIDs."""
        self._write("node", colons(identity.node_guid))
        self._write("port", colons(identity.port_guid))

    def difference(self, identity: VfIdentity) -> str:
        """Compare with the firmware's values."""
        policy = self._read("policy")
        node, port = (int(self._read(name).replace(":", ""), 16) for name in ("node", "port"))
        wrong = _guids(node, port, identity.node_guid, identity.port_guid)
        return wrong or ("" if policy == "Down" else f"its policy is {policy}, not Down")

    def park(self) -> None:
        """Set the parked GUIDs."""
        self.set(VfIdentity(PARKED_GUID, PARKED_GUID))

    def why_not_parked(self) -> str:
        """As ``difference``."""
        return self.difference(VfIdentity(PARKED_GUID, PARKED_GUID))


class Mlx4:
    """ConnectX-3: the physical port is in the partition, the function sees the keys that are mapped to it.

    Its first key is the job's, its second the default partition's, which
    queries of the subnet manager need.  Disconnected means: no key is mapped.
    """

    infiniband = True
    wait_s = 15.0
    """Seconds for the subnet manager to put the key into the port's table and to accept the GUID."""

    def __init__(self, iov: str, address: str, timeout_s: float) -> None:
        self.iov, self.timeout_s = iov, timeout_s
        self.port = f"{iov}/{address}/ports/{PORT}"
        self.table = f"{iov}/ports/{PORT}"

    def _map(self, *indexes: str) -> None:
        for number, index in enumerate(indexes):
            attribute.write_attribute(f"{self.port}/pkey_idx/{number}", index, self.timeout_s)

    def _mapped(self) -> tuple[str, str]:
        first, second = (
            attribute.read_attribute(f"{self.port}/pkey_idx/{n}", self.timeout_s) for n in (0, 1)
        )
        return first, second

    def _guid_path(self) -> str:
        return f"{self.table}/admin_guids/{sysfs.text_or_empty(f'{self.port}/gid_idx/0')}"

    def switch_off(self) -> None:
        """Remove all mapped keys."""
        self._map("none", "none")
        self._keys = ("none", "none")

    def switch_on(self) -> None:
        """Map the keys that ``set`` found, and verify it."""
        self._map(*self._keys)
        if self._mapped() != self._keys:
            raise OSError(errno.EIO, f"keys {self._keys} were written, {self._mapped()} are mapped")

    def set(self, identity: VfIdentity) -> None:
        """Set the GUID, and find the indexes of the keys in the port's table."""
        attribute.write_attribute(self._guid_path(), f"{identity.port_guid:016x}", self.timeout_s)
        self._keys = self._index(identity.pkey), self._index(DEFAULT_PKEY)

    def _index(self, pkey: int) -> str:
        """Index of a key in the port's table; waits until the subnet manager has written it."""
        until = time.monotonic() + self.wait_s
        while True:
            for number, path in sysfs.numbered(f"{self.table}/pkeys", ""):
                value = sysfs.text_or_empty(path)
                if value and int(value, 16) & PKEY_MASK == pkey:
                    return str(number)
            if time.monotonic() >= until:
                raise OSError(
                    errno.ENOENT, f"the port has no partition key {pkey:#06x} after {self.wait_s:g} s"
                )
            time.sleep(0.5)

    def difference(self, identity: VfIdentity) -> str:
        """Check the GUID, and that no key is mapped yet."""
        guid = int(attribute.read_attribute(self._guid_path(), self.timeout_s) or "0", 16)
        if guid != identity.port_guid:
            return f"its GUID is {colons(guid)}, not {colons(identity.port_guid)}"
        return self._any_key()

    def _any_key(self) -> str:
        left = [index for index in self._mapped() if index != "none"]
        return f"the keys with indexes {', '.join(left)} are still mapped" if left else ""

    def park(self) -> None:
        """Remove the GUID: all ones delete it."""
        attribute.write_attribute(self._guid_path(), f"{PARKED_GUID:016x}", self.timeout_s)

    def why_not_parked(self) -> str:
        """Check that there is no GUID and no key."""
        return self.difference(VfIdentity(port_guid=PARKED_GUID))


class Ethernet:
    """The host sets MAC and VLAN; the function can forge neither and is not trusted."""

    infiniband = False

    def __init__(self, index: int, number: int) -> None:
        self.index, self.number = index, number
        self._off = False

    def _state(self, state: int) -> bool:
        """Set the link state; False if the driver does not support it (82576): its functions are silent."""
        try:
            with Link(self.index) as link:
                link.set(rtnetlink.set_flag(LINK_STATE, self.number, state))
        except OSError as err:
            if err.errno != errno.EOPNOTSUPP:
                raise
            return False
        return True

    def switch_off(self) -> None:
        """Set the link down."""
        self._off = self._state(DISABLE)

    def switch_on(self) -> None:
        """Let the link follow the physical one."""
        self._state(AUTO)

    def set(self, identity: VfIdentity) -> None:
        """Set everything, including the spoof check: without it a guest could use another one's address.

        Trust and rate are reset only if they are set: drivers refuse them in
        some states (igb any rate while its link is down).
        """
        with Link(self.index) as link:
            link.set(rtnetlink.set_mac(self.number, identity.mac))
            link.set(rtnetlink.set_vlan(self.number, identity.vlan))
            link.set(rtnetlink.set_flag(SPOOFCHK, self.number, 1))
            now = link.info(self.number)
            if now.trust:
                link.set(rtnetlink.set_flag(TRUST, self.number, 0))
            if now.rate != (0, 0):
                link.set(rtnetlink.set_rate(self.number, 0, 0))

    def difference(self, identity: VfIdentity) -> str:
        """Compare with the driver's values."""
        with Link(self.index) as link:
            info = link.info(self.number)
        wanted = VfInfo(identity.mac, identity.vlan, spoofchk=True)
        for what, is_, should in (
            ("MAC address", info.mac.hex(":"), wanted.mac.hex(":")),
            ("VLAN", info.vlan, wanted.vlan),
            ("spoof check", info.spoofchk, True),
            ("trust", info.trust or False, False),
            ("rate", info.rate, (0, 0)),
            ("link state", info.link_state, DISABLE if self._off else info.link_state),
        ):
            if is_ != should:
                return f"its {what} is {is_}, not {should}"
        return ""

    def park(self) -> None:
        """Remove MAC address and VLAN."""
        self.set(VfIdentity(mac=NO_MAC))

    def why_not_parked(self) -> str:
        """As ``difference``."""
        return self.difference(VfIdentity(mac=NO_MAC))
