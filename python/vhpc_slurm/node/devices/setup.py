# SPDX-License-Identifier: Apache-2.0
"""Preparation of a node at each boot, before slurmd: virtual functions, huge pages, device files.

Every step reports the current state, does only what is missing, and verifies
the result; so it may be repeated at any time.

Sources: Documentation/PCI/pci-iov-howto.rst, Documentation/admin-guide/mm/hugetlbpage.rst,
Documentation/admin-guide/devices.rst (majors 120 to 127 and 240 to 254 are for local use); for IOMMU groups
drivers/acpi/arm64/iort.c and drivers/base/dd.c of Linux 6.12.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path

from vhpc_slurm.device import VirtualFunctionTraits
from vhpc_slurm.errors import NodeError, VhpcError
from vhpc_slurm.hardware import PCI_ADDRESS
from vhpc_slurm.node.devices import gpumap, quarantine, vf, vf_drivers
from vhpc_slurm.node.devices.pci_function import virtual_functions
from vhpc_slurm.node.devices.preflight import VFIO, bound_to, device_path
from vhpc_slurm.node.host import attribute, sysfs
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record

GPU_NODES = Path("/dev/vhpc")
# drivers without a number of their own get one of the first: on Debian's kernel for arm64 they use all
LOCAL_MAJORS: tuple[int, ...] = (*range(240, 255), *range(120, 128))
PAGE_KIB = {"2M": 2048, "512M": 524288, "1G": 1048576}
_POOL = re.compile(r"(2M|512M|1G):([0-9]{1,4})=([0-9]{1,9})", re.ASCII)
_DRIVER_PAUSE_S = 0.1
_GPU_NODE = re.compile(r"gpu[0-9]{1,4}", re.ASCII)


class State(StrEnum):
    """Result of a step."""

    OK = "ok"
    DONE = "done"
    MISSING = "missing"
    FAILED = "failed"


class SetupStep(Record, frozen=True):
    """One step: its object, its result, and the error."""

    kind: str
    what: str
    state: State
    error: str = ""


class Place(Record, frozen=True):
    """Paths of the node's files; tests use other values."""

    proc: Path = Path("/proc")
    gpu_nodes: Path = GPU_NODES


def steps(
    layout: Layout, held: Mapping[str, str], *, dry_run: bool, place: Place | None = None
) -> Iterator[SetupStep]:
    """Do all steps, with ``dry_run`` none; a failed step does not stop the others.

    Args:
        layout: of this node.
        held: generation by address, of devices that guests have now.
        dry_run: only report what is missing.
        place: paths of the node's files.
    """
    place = place or Place()
    for wish in layout.config.devices.virtual_functions:
        yield from _virtual_functions(layout, wish, held, dry_run=dry_run)
    yield from _gpu_nodes(layout, place, dry_run=dry_run)
    yield from _iommu_groups(layout, dry_run=dry_run)
    for wish in layout.config.host.hugepages:
        yield _hugepages(layout, wish, place, dry_run=dry_run)


def _step(kind: str, what: str, action: Callable[[], None], *, dry_run: bool) -> SetupStep:
    """Do a missing step."""
    if dry_run:
        return SetupStep(kind, what, State.MISSING)
    try:
        action()
    except (VhpcError, OSError) as err:
        line = (
            err.line() if isinstance(err, VhpcError) else f"{err.filename or ''}: {err.strerror}".strip(": ")
        )
        return SetupStep(kind, what, State.FAILED, line)
    return SetupStep(kind, what, State.DONE)


# --- virtual functions ------------------------------------------------------------------


def _virtual_functions(
    layout: Layout, wish: str, held: Mapping[str, str], *, dry_run: bool
) -> Iterator[SetupStep]:
    pf, _, number = wish.partition("=")
    if not PCI_ADDRESS.fullmatch(pf) or not number.isdecimal():
        why = "ADDRESS=COUNT is expected, like 0000:3b:00.0=8"
        yield SetupStep("vfs", f"devices.virtual_functions has {wish[:60]!r}", State.FAILED, why)
        return
    root, timeout_s = layout.config.host.sysfs_root, layout.config.devices.timeout_s
    path, count = device_path(root, pf), int(number)
    if not sysfs.listing(path):
        yield SetupStep("vfs", f"{count} virtual functions of {pf}", State.FAILED, f"{pf} does not exist")
        return
    # first: no host driver may ever be bound to a virtual function
    probe = sysfs.text_or_empty(f"{path}/sriov_drivers_autoprobe")
    what = f"no driver of the host for virtual functions of {pf}"
    if probe in ("0", ""):
        yield SetupStep("autoprobe", what, State.OK if probe else State.FAILED, "" if probe else "no SR-IOV")
    else:
        write = partial(attribute.write_attribute, f"{path}/sriov_drivers_autoprobe", "0", timeout_s)
        yield _step("autoprobe", what, write, dry_run=dry_run)
    what = f"{count} virtual functions of {pf}"
    if len(virtual_functions(path)) == count:
        yield SetupStep("vfs", what, State.OK)
    else:
        made = _step("vfs", what, partial(_make, pf, path, count, held, timeout_s), dry_run=dry_run)
        yield made
        if made.state is not State.DONE:
            return
    for address in virtual_functions(path):
        if address not in held:
            yield _park(layout, address, dry_run=dry_run)


def _make(pf: str, path: str, count: int, held: Mapping[str, str], timeout_s: float) -> None:
    """Set the number of functions, which goes through zero.

    Raises:
        NodeError: a guest has one, no driver creates them, or the driver created another number.
        OSError: the kernel refused.
    """
    there = virtual_functions(path)
    busy = [address for address in there if address in held]
    if busy:
        raise NodeError(
            f"{pf} has {len(there)} virtual functions",
            f"guests have {', '.join(busy)}",
            "repeat it when they have ended",
        )
    _await_driver(pf, path, timeout_s)
    try:
        for number in ("0", str(count)) if there else (str(count),):
            attribute.write_attribute(f"{path}/sriov_numvfs", number, timeout_s)
    except OSError as err:
        raise NodeError(
            f"{pf} cannot create {count} virtual functions", str(err.strerror), _hint(err, path)
        ) from err
    made = len(virtual_functions(path))
    if made != count:
        raise NodeError(f"{pf} created {made} virtual functions of {count}", "", "see dmesg")


def _await_driver(pf: str, path: str, timeout_s: float) -> None:
    """Wait for the driver of a physical function: early in a boot its module may not be loaded yet.

    Raises:
        NodeError: no driver was bound in time.
    """
    until = time.monotonic() + timeout_s
    while not sysfs.link(f"{path}/driver"):
        if time.monotonic() >= until:
            why = f"none was bound within {timeout_s:g} s"
            raise NodeError(
                f"{pf} has no driver",
                why,
                "check that its module is installed and not blacklisted; see dmesg",
            )
        time.sleep(_DRIVER_PAUSE_S)


def _hint(err: OSError, path: str) -> str:
    if err.errno == errno.ENOENT:
        return "its driver creates them only when it is loaded: mlx4_core by its option num_vfs"
    if err.errno == errno.ERANGE:
        most = sysfs.text_or_empty(f"{path}/sriov_totalvfs") or "few"
        return f"its limit is {most}, which is a firmware setting"
    return "see dmesg"


def _park(layout: Layout, address: str, *, dry_run: bool) -> SetupStep:
    """Park a function; quarantine it if that fails."""
    what = f"virtual function {address} is parked"
    timeout_s = layout.config.devices.timeout_s
    try:
        vf_driver = vf_drivers.find(layout.config.host.sysfs_root, address, timeout_s)
        if not vf_driver.why_not_parked():
            return SetupStep("park", what, State.OK)
    except (VhpcError, OSError) as err:
        line = err.line() if isinstance(err, VhpcError) else str(err)
        return SetupStep("park", what, State.FAILED, line)
    step = _step("park", what, partial(vf.park, vf_driver, address), dry_run=dry_run)
    if step.state is State.FAILED:
        with contextlib.suppress(OSError):
            quarantine.put(layout, quarantine.record(address, VirtualFunctionTraits.name, step.error))
    return step


# --- device files for gres.conf ----------------------------------------------------------------


def _gpu_nodes(layout: Layout, place: Place, *, dry_run: bool) -> Iterator[SetupStep]:
    """Character devices for the File= of GPUs in gres.conf; Slurm counts them in their order.

    Their device numbers belong to no driver, so that they cannot be opened, and
    differ, so that Slurm's device constraints can distinguish them.
    """
    try:
        gpus = gpumap.read_gpu_map(Path(layout.config.placement.gpu_map))
        major = _major(place) if gpus else 0
    except (VhpcError, OSError) as err:
        yield SetupStep(
            "gpu",
            "device files for gres.conf",
            State.FAILED,
            err.line() if isinstance(err, VhpcError) else str(err),
        )
        return
    for index, address in enumerate(gpus):
        path = place.gpu_nodes / f"gpu{index}"
        what = f"{path} is the device file of GPU {address}"
        if _is_node(path, index):
            yield SetupStep("gpu", what, State.OK)
        else:
            yield _step("gpu", what, partial(_make_node, path, os.makedev(major, index)), dry_run=dry_run)
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(place.gpu_nodes.iterdir()):
            if _GPU_NODE.fullmatch(path.name) and int(path.name[3:]) >= len(gpus):
                yield _step("gpu", f"{path} has no GPU: it is removed", path.unlink, dry_run=dry_run)


def _major(place: Place) -> int:
    """A major number for local use that no driver has."""
    text = (place.proc / "devices").read_text().partition("Block devices:")[0]
    used = {int(line.split()[0]) for line in text.splitlines() if line[:4].strip().isdigit()}
    for major in LOCAL_MAJORS:
        if major not in used:
            return major
    raise NodeError(
        "no major number is free for /dev/vhpc/gpuN",
        "drivers use all numbers from 120 to 127 and from 240 to 254",
    )


def _is_node(path: Path, index: int) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return (
        stat.S_ISCHR(found.st_mode)
        and os.minor(found.st_rdev) == index
        and os.major(found.st_rdev) in LOCAL_MAJORS
    )


def _make_node(path: Path, number: int) -> None:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    os.mknod(new, 0o600 | stat.S_IFCHR, number)
    new.rename(path)


# --- IOMMU groups -----------------------------------------------------------------------


def _iommu_groups(layout: Layout, *, dry_run: bool) -> Iterator[SetupStep]:
    """On Arm, older kernels give a function its group when a driver probes it; some GPUs have no driver."""
    root = layout.config.host.sysfs_root
    gpus: tuple[str, ...] = ()
    with contextlib.suppress(VhpcError, OSError):  # the step of device files reports it
        gpus = gpumap.read_gpu_map(Path(layout.config.placement.gpu_map))
    for address in filter(PCI_ADDRESS.fullmatch, gpus if sysfs.listing(f"{root}/class/iommu") else ()):
        path = device_path(root, address)
        if sysfs.listing(path) and not sysfs.link(f"{path}/driver") and not sysfs.link(f"{path}/iommu_group"):
            what = f"GPU {address} has an IOMMU group"
            probe = partial(_probe, root, address, layout.config.devices.timeout_s)
            yield _step("iommu", what, probe, dry_run=dry_run)


def _probe(root: str, address: str, timeout_s: float) -> None:
    """Let vfio-pci probe a function, and release it again.

    Raises:
        NodeError: it still has no group.
        OSError: the kernel refused.
    """
    path = device_path(root, address)
    try:
        attribute.write_attribute(f"{path}/driver_override", VFIO, timeout_s)
        attribute.write_attribute(f"{root}/bus/pci/drivers_probe", address, timeout_s)
        if bound_to(root, address) == VFIO:
            attribute.write_attribute(f"{root}/bus/pci/drivers/{VFIO}/unbind", address, timeout_s)
    finally:
        attribute.write_attribute(f"{path}/driver_override", "\n", timeout_s)  # removes it
    if not sysfs.link(f"{path}/iommu_group"):
        raise NodeError(f"device {address} has no IOMMU group", f"{VFIO} did not probe it", "see dmesg")


# --- huge pages -------------------------------------------------------------------------


def _hugepages(layout: Layout, wish: str, place: Place, *, dry_run: bool) -> SetupStep:
    match = _POOL.fullmatch(wish)
    if match is None:
        why = "SIZE:CELL=COUNT is expected, like 1G:0=64"
        return SetupStep("hugepages", f"host.hugepages has {wish[:60]!r}", State.FAILED, why)
    size, cell, count = match[1], int(match[2]), int(match[3])
    what = f"{count} pages of {size} of NUMA cell {cell}"
    path = (
        f"{layout.config.host.sysfs_root}/devices/system/node/node{cell}"
        f"/hugepages/hugepages-{PAGE_KIB[size]}kB/nr_hugepages"
    )
    there = sysfs.text_or_empty(path)
    if not there.isdecimal():
        return SetupStep("hugepages", what, State.FAILED, f"{path} does not exist")
    if int(there) >= count:
        return SetupStep("hugepages", what, State.OK)
    return _step("hugepages", what, partial(_grow, path, count, size, place), dry_run=dry_run)


def _grow(path: str, count: int, size: str, place: Place) -> None:
    """Request pages, and read how many there are: the kernel may grant fewer without an error.

    Raises:
        NodeError: too few, even after memory was compacted.
        OSError: the kernel refused.
    """
    for attempt in range(2):
        if attempt:
            for name, text in (("drop_caches", "3"), ("compact_memory", "1")):
                (place.proc / "sys/vm" / name).write_text(text)
        attribute.write_attribute(path, str(count), 120.0)  # it clears them
        granted = int(sysfs.text_or_empty(path) or 0)
        if granted >= count:
            return
    raise NodeError(
        f"the kernel granted {granted} huge pages of {count}",
        "memory is too small or fragmented",
        "reserve them when the kernel starts: hugepagesz=1G hugepages=…"
        if size == "1G"
        else "reboot the node",
    )
