# SPDX-License-Identifier: Apache-2.0
"""The drivers that set virtual functions, and which one a physical function needs.

=====================  =====================================================================
``NetlinkInfiniband``  mlx5 of Linux, by the IPoIB interface of the physical function
                       (drivers/infiniband/hw/mlx5/ib_virt.c)
``OfedInfiniband``     mlx5 of MLNX_OFED and DOCA: ``sriov/N/{node,port,policy}``, which ask the firmware
``Mlx4``               ConnectX-3: GUID and partition keys are mapped by the host
                       (drivers/infiniband/hw/mlx4/sysfs.c)
``Ethernet``           every driver with ``ndo_set_vf_*``: MAC, VLAN, spoof check, trust, rate
=====================  =====================================================================
"""

from __future__ import annotations

import errno
import time

from vhpc_slurm.hardware import VfIdentity
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
PORT = 1  # each port of an mlx5 adapter is a physical function of its own; of mlx4 the first is used


def find(root: str, address: str, timeout_s: float) -> VfDriver:
    """The driver that sets a virtual function.

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
    """Number of the physical function's own interface: not one of its partitions', which have a parent."""
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
        """The port is down, whatever the cable says."""
        self._set(rtnetlink.set_flag(LINK_STATE, self.number, DISABLE))

    def switch_on(self) -> None:
        """The port follows the physical one."""
        self._set(rtnetlink.set_flag(LINK_STATE, self.number, AUTO))

    def set(self, identity: VfIdentity) -> None:
        """Both GUIDs: the node's has to be unique, too."""
        self._set(
            rtnetlink.set_guid(NODE_GUID, self.number, identity.node_guid),
            rtnetlink.set_guid(PORT_GUID, self.number, identity.port_guid),
        )

    def difference(self, identity: VfIdentity) -> str:
        """The kernel answers from its own memory (5.5 and later), not from the firmware's."""
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
            return f"the kernel does not say its {what} GUID"
        if is_ != wanted:
            return f"its {what} GUID is {colons(is_)}, not {colons(wanted)}"
    return ""


class OfedInfiniband:
    """The same, by files that only Mellanox's own drivers have."""

    infiniband = True

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path, self.timeout_s = path, timeout_s

    def _write(self, name: str, text: str) -> None:
        # older ones compare with the newline
        attribute.write_attribute(f"{self.path}/{name}", f"{text}\n", self.timeout_s)

    def _read(self, name: str) -> str:
        return attribute.read_attribute(f"{self.path}/{name}", self.timeout_s)

    def switch_off(self) -> None:
        """The port is down."""
        self._write("policy", "Down")

    def switch_on(self) -> None:
        """The port follows the physical one."""
        self._write("policy", "Follow")

    def set(self, identity: VfIdentity) -> None:
        """Both GUIDs."""
        self._write("node", colons(identity.node_guid))
        self._write("port", colons(identity.port_guid))

    def difference(self, identity: VfIdentity) -> str:
        """What the firmware says."""
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

    Its first key is the job's, its second the default partition's, which the
    subnet manager's queries need.  Switched off is: no key at all.
    """

    infiniband = True
    wait_s = 15.0
    """For the subnet manager: to put the key into the port's table, and to take the GUID."""

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
        """No key is mapped."""
        self._map("none", "none")
        self._keys = ("none", "none")

    def switch_on(self) -> None:
        """Map what ``set`` found, and see that it is so."""
        self._map(*self._keys)
        if self._mapped() != self._keys:
            raise OSError(errno.EIO, f"keys {self._keys} were mapped, {self._mapped()} are")

    def set(self, identity: VfIdentity) -> None:
        """The GUID, and where in the port's table the keys are."""
        attribute.write_attribute(self._guid_path(), f"{identity.port_guid:016x}", self.timeout_s)
        self._keys = self._index(identity.pkey), self._index(DEFAULT_PKEY)

    def _index(self, pkey: int) -> str:
        """Where a key is in the port's table; the subnet manager may be just about to put it there."""
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
        """The GUID that was asked for, and no key mapped yet."""
        guid = int(attribute.read_attribute(self._guid_path(), self.timeout_s) or "0", 16)
        if guid != identity.port_guid:
            return f"its GUID is {colons(guid)}, not {colons(identity.port_guid)}"
        return self._any_key()

    def _any_key(self) -> str:
        left = [index for index in self._mapped() if index != "none"]
        return f"it still has the keys at {', '.join(left)}" if left else ""

    def park(self) -> None:
        """The GUID is taken back: all ones delete it."""
        attribute.write_attribute(self._guid_path(), f"{PARKED_GUID:016x}", self.timeout_s)

    def why_not_parked(self) -> str:
        """No GUID, no key."""
        return self.difference(VfIdentity(port_guid=PARKED_GUID))


class Ethernet:
    """MAC and VLAN are the host's to set; the function may forge neither, and is trusted with nothing."""

    infiniband = False

    def __init__(self, index: int, number: int) -> None:
        self.index, self.number = index, number
        self._off = False

    def _state(self, state: int) -> bool:
        """Not every driver (82576) has a link state for its functions; without a driver they are silent."""
        try:
            with Link(self.index) as link:
                link.set(rtnetlink.set_flag(LINK_STATE, self.number, state))
        except OSError as err:
            if err.errno != errno.EOPNOTSUPP:
                raise
            return False
        return True

    def switch_off(self) -> None:
        """The link is down."""
        self._off = self._state(DISABLE)

    def switch_on(self) -> None:
        """The link follows the physical one."""
        self._state(AUTO)

    def set(self, identity: VfIdentity) -> None:
        """All of it, the check of forged addresses among it: without that a guest could speak for another.

        Trust and rate are taken back only where there is some: drivers refuse
        either for reasons of their own (igb any rate while its link is down).
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
        """What the driver says."""
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
        """No MAC address, no VLAN."""
        self.set(VfIdentity(mac=NO_MAC))

    def why_not_parked(self) -> str:
        """As ``difference``."""
        return self.difference(VfIdentity(mac=NO_MAC))
