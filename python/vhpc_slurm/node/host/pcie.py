# SPDX-License-Identifier: Apache-2.0
"""Peer-to-peer traffic of PCI Express functions, by their configuration space: ACS and ATS.

Only root can read it; a captured tree may have only its first bytes.

Sources: include/uapi/linux/pci_regs.h (PCI_EXT_CAP_ID_ACS, PCI_EXT_CAP_ID_ATS); PCI Express Base
Specification, Access Control Services; Documentation/ABI/testing/sysfs-bus-pci (config).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property

from vhpc_slurm.node.host import pci, sysfs
from vhpc_slurm.record import Record

EXTENDED, END = 0x100, 0x1000
ACS, ATS = 0x0D, 0x0F
VALIDATION, BLOCKING, REQUESTS, COMPLETIONS, UPSTREAM, EGRESS, DIRECT = (1 << bit for bit in range(7))
"""Bits of ACS: source validation, translation blocking, request redirect, completion redirect, upstream
forwarding, egress control, direct translated P2P."""
ISOLATION = VALIDATION | REQUESTS | COMPLETIONS | UPSTREAM
"""The kernel calls a port isolated if it has these (REQ_ACS_FLAGS, drivers/iommu/iommu.c)."""
_ENABLED = 0x8000


class Controls(Record, frozen=True):
    """Peer-to-peer controls of a function.

    Attributes:
        acs_can, acs_on: bits of ACS that it supports, and those that are on; 0 without ACS.
        ats: whether ATS is on; None without ATS.
    """

    acs_can: int = 0
    acs_on: int = 0
    ats: bool | None = None


def controls(path: str) -> Controls | None:
    """Controls of a function (its folder); None if its extended configuration space cannot be read."""
    at = _capabilities(path)
    if at is None:
        return None
    can = on = 0
    ats = None
    if ACS in at:
        can, on = _words(path, at[ACS])
        on &= can
    if ATS in at:
        ats = bool(_words(path, at[ATS])[1] & _ENABLED)
    return Controls(can, on, ats)


def folder(sysfs_root: str, address: str) -> str:
    """Folder of a function."""
    return f"{sysfs_root}/bus/pci/devices/{address}"


def downstream(bridges: Sequence[str], start: int = 1) -> list[str]:
    """Downstream ports of switches in a chain of bridges, which begins with a root port; from a place on."""
    return [port for at, port in enumerate(bridges) if at >= max(start, 1) and at % 2 == 0]


class Switches:
    """PCI Express switches of a node: bridges and ports are read once, for questions about many devices."""

    def __init__(self, sysfs_root: str) -> None:
        self._root = sysfs_root
        self._isolating: dict[str, bool] = {}

    def unguarded(self, address: str) -> dict[str, str]:
        """Functions below the same switches that one can reach, or that can reach it, without the IOMMU.

        By their addresses, with the port whose ACS is off or missing.  IOMMU groups do not show it: the
        kernel makes them at boot, and before its series "Fix incorrect iommu_groups with PCIe ACS" devices
        below ports without ACS had groups of their own (seen with 6.12).  Root ports are not judged: some
        have registers that only the kernel knows.
        """
        found: dict[str, str] = {}
        own = pci.place(sysfs.link(folder(self._root, address)))[1]
        if not downstream(own):
            return found
        for other, chain in self._chains.items():
            shared = common(own, chain)
            if shared < 2 or shared % 2 or shared >= min(len(own), len(chain)):
                continue  # they part at the upstream port of no switch
            for port in (own[shared], chain[shared]):
                if not self._isolates(port) and not _is_bridge(folder(self._root, other)):
                    found[other] = port
        return found

    @cached_property
    def _chains(self) -> dict[str, tuple[str, ...]]:
        """Bridges above each function, from the root port down."""
        names = sysfs.listing(f"{self._root}/bus/pci/devices")
        return {name: pci.place(sysfs.link(folder(self._root, name)))[1] for name in names}

    def _isolates(self, port: str) -> bool:
        """Whether a port redirects all that the kernel requires; also if it cannot be read."""
        if port not in self._isolating:
            has = controls(folder(self._root, port))
            self._isolating[port] = has is None or (
                has.acs_can != 0 and not has.acs_can & ISOLATION & ~has.acs_on
            )
        return self._isolating[port]


def common(one: Sequence[str], other: Sequence[str]) -> int:
    """Number of bridges that two functions share, from the root port down."""
    count = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        count += 1
    return count


def _is_bridge(path: str) -> bool:
    return sysfs.text_or_empty(f"{path}/class").startswith("0x0604")


def config_space(path: str, offset: int, size: int) -> bytes:
    """Bytes of a function's configuration space; empty if it cannot be read."""
    try:
        fd = os.open(f"{path}/config", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(fd, size, offset)
    except OSError:
        return b""
    finally:
        os.close(fd)


def _words(path: str, at: int) -> tuple[int, int]:
    """The capability register and the control register of ACS or ATS."""
    raw = config_space(path, at + 4, 4)
    return int.from_bytes(raw[:2], "little"), int.from_bytes(raw[2:], "little")


def _capabilities(path: str) -> dict[int, int] | None:
    """Offsets of extended capabilities by their id."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    at = EXTENDED
    while EXTENDED <= at < END and at not in seen:
        seen.add(at)
        raw = config_space(path, at, 4)
        if len(raw) < 4:
            return None if at == EXTENDED else found
        header = int.from_bytes(raw, "little")
        if header in (0, 0xFFFFFFFF):
            break
        found.setdefault(header & 0xFFFF, at)
        at = header >> 20 & ~3
    return found
