# SPDX-License-Identifier: Apache-2.0
"""GPUDirect: whether data between a GPU and an adapter below one switch pass through this switch alone.

A guest's devices use addresses that the IOMMU must translate, so the ports of a switch redirect their
requests to the root complex (ACS).  With ATS an adapter has its addresses translated in advance; a port with
ACS direct translated P2P forwards such requests to the GPU.

Sources: NVIDIA, Optimizing VM Configuration for AI Inference, appendix on ATS and ACS; PCI Express Base
Specification, 6.12.3 (direct translated P2P: "regardless of" request redirect and egress control).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from vhpc_slurm.hardware import PciFunction
from vhpc_slurm.node.host import pcie
from vhpc_slurm.node.host.pcie import Controls, common, downstream
from vhpc_slurm.record import Record

FAST_QEMU = 10_001_000
"""QEMU 10.1, as libvirt encodes versions: the first one that maps large BARs quickly."""
LARGE_BAR = 16 << 30

Reader = Callable[[str], Controls | None]
"""Address of a function -> its controls; None if they cannot be read."""


class Pair(Record, frozen=True):
    """A GPU and an adapter below one switch.

    Attributes:
        gpu, adapter: their addresses; the adapter is the physical function.
        ports: downstream ports between both and the switch that they share.
    """

    gpu: str
    adapter: str
    ports: tuple[str, ...]


class Detour(Record, frozen=True):
    """Why data between a GPU and an adapter pass through the root complex, and what to do."""

    why: str
    hint: str


def reader(sysfs_root: str) -> Reader:
    """Reads the controls of this host's functions."""
    return lambda address: pcie.controls(pcie.folder(sysfs_root, address))


def pairs(gpus: Iterable[PciFunction], adapters: Sequence[PciFunction]) -> list[Pair]:
    """For each GPU the adapters that are nearest to it, of those below a switch with it."""
    found = []
    for gpu in gpus:
        shared = {one.address: common(gpu.bridges, one.bridges) for one in adapters}
        best = max(shared.values(), default=0)
        if best < 2 or best % 2:  # the last common bridge is the upstream port of no switch
            continue
        for one in adapters:
            if shared[one.address] == best:
                ports = (*downstream(gpu.bridges, best), *downstream(one.bridges, best))
                found.append(Pair(gpu.address, one.address, ports))
    return found


def detours(pair: Pair, read: Reader) -> Iterator[Detour]:
    """All reasons for a detour between a pair; none also if nothing can be read."""
    adapter = read(pair.adapter)
    if adapter is not None and not adapter.ats:
        state = "has no ATS" if adapter.ats is None else "has ATS, which is off"
        hint = f"mlxconfig -d {pair.adapter} set ATS_ENABLED=true, then reboot the host"
        yield Detour(f"adapter {pair.adapter} {state}", hint)
    for port in pair.ports:
        own = read(port)
        if own is None or not own.acs_on & (pcie.REQUESTS | pcie.EGRESS | pcie.BLOCKING):
            continue
        wanted = (own.acs_on | pcie.DIRECT) & ~pcie.BLOCKING
        hint = f"at each boot: setpci -s {port} ECAP_ACS+6.w={wanted:04x}"
        if own.acs_on & pcie.BLOCKING:
            yield Detour(f"port {port} blocks translated requests", hint)
        elif not own.acs_can & pcie.DIRECT:
            yield Detour(f"port {port} cannot forward translated requests", "it lacks direct translated P2P")
        elif not own.acs_on & pcie.DIRECT:
            yield Detour(f"port {port} does not forward translated requests", hint)


def slow_bars(functions: Iterable[PciFunction], qemu: int) -> list[str]:
    """Addresses of functions whose BARs this QEMU maps slowly; none if its version is unknown (0)."""
    if not qemu or qemu >= FAST_QEMU:
        return []
    return [one.address for one in functions if any(bar.size >= LARGE_BAR for bar in one.bars)]
