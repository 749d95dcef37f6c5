# SPDX-License-Identifier: Apache-2.0
"""Binds a PCI function to vfio-pci and back, in steps after each of which a crash may happen.

``driver_override`` marks a function as vhpc's: it is written first and restored
last, so that a release after a crash can continue.  Every step reads the current
state before it acts.

Sources: Documentation/ABI/testing/sysfs-bus-pci (driver_override, reset, reset_method),
Documentation/driver-api/vfio.rst.
"""
# Decision: driver_override records who holds a device

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from vhpc_slurm.errors import NodeError
from vhpc_slurm.node.devices.device_class import NotCleanError
from vhpc_slurm.node.devices.preflight import COMMAND, VFIO, Before, bound_to, device_path
from vhpc_slurm.node.host import attribute, sysfs
from vhpc_slurm.node.host.pcie import config_space

BUS_MASTER = 0x4
KMSG = Path("/dev/kmsg")
GIVEN_UP = re.compile(r"not ready \d+ms after .*giving up", re.ASCII)


def bind(root: str, address: str, before: Before, timeout_s: float) -> None:
    """Bind a function to vfio-pci.  It is kept awake from then on; this is never undone.

    Raises:
        StuckError: its current driver does not release it.
        NodeError: the kernel refused.
    """
    path = device_path(root, address)
    try:
        attribute.write_attribute(f"{path}/driver_override", VFIO, timeout_s)
        for name, text in (("power/control", "on"), ("d3cold_allowed", "0")):
            # older kernels and conventional PCI lack it; without D3cold nothing must be prevented
            if sysfs.text(f"{path}/{name}") is not None:
                attribute.write_attribute(f"{path}/{name}", text, timeout_s)
        if before.methods is not None and before.methods != before.accepted:
            attribute.write_attribute(f"{path}/reset_method", " ".join(before.accepted), timeout_s)
        _unbind(root, address, timeout_s, keep=VFIO)
        if bound_to(root, address) != VFIO:
            attribute.write_attribute(f"{root}/bus/pci/drivers/{VFIO}/bind", address, timeout_s)
    except OSError as err:
        raise NodeError(
            f"device {address} cannot be bound to {VFIO}", f"{err.filename}: {err.strerror}", "see dmesg"
        ) from err
    if bound_to(root, address) != VFIO:
        raise NodeError(
            f"device {address} cannot be bound to {VFIO}",
            f"{bound_to(root, address) or 'no driver'} is bound to it",
            "see dmesg",
        )


def give_back(
    root: str,
    address: str,
    driver: str,
    override: str,
    methods: tuple[str, ...] | None,
    timeout_s: float | attribute.Until,
) -> None:
    """Bind a function to its former driver.

    Raises:
        StuckError: the kernel does not answer.
        NotCleanError: afterwards it is bound to another driver, or none.
        OSError: the kernel refused.
    """
    path = device_path(root, address)
    if methods is not None and tuple(sysfs.text_or_empty(f"{path}/reset_method").split()) != methods:
        attribute.write_attribute(f"{path}/reset_method", " ".join(methods), timeout_s)
    if driver != VFIO:
        _unbind(root, address, timeout_s, keep=driver)
    # an empty line removes it
    attribute.write_attribute(f"{path}/driver_override", override or "\n", timeout_s)
    if driver and bound_to(root, address) != driver:
        attribute.write_attribute(f"{root}/bus/pci/drivers_probe", address, timeout_s)
    now = bound_to(root, address)
    if now != driver:
        raise NotCleanError(
            f"device {address} is bound to {now or 'no driver'}",
            f"before the job it was bound to {driver or 'no driver'}",
            "see dmesg",
        )


def _unbind(root: str, address: str, timeout_s: float | attribute.Until, *, keep: str) -> None:
    now = bound_to(root, address)
    if now and now != keep:
        try:
            attribute.write_attribute(f"{root}/bus/pci/drivers/{now}/unbind", address, timeout_s)
        except OSError as err:
            if err.errno != errno.ENODEV:  # another process was faster
                raise


def reset(root: str, address: str, timeout_s: float | attribute.Until) -> None:
    """Reset a function, and verify its state afterwards.

    vfio-pci resets at the last close, too, but does not report the result.

    Raises:
        StuckError: the kernel does not answer.
        NotCleanError: the reset failed, or the function is in a wrong state afterwards.
    """
    path = device_path(root, address)
    identity = sysfs.text_or_empty(f"{path}/vendor"), sysfs.text_or_empty(f"{path}/device")
    log = _follow()
    try:
        attribute.write_attribute(f"{path}/reset", "1", timeout_s)
        complaint = _complaint(log, address)
    except OSError as err:
        raise NotCleanError(f"device {address} cannot be reset", str(err.strerror), "see dmesg") from err
    finally:
        if log >= 0:
            os.close(log)
    head = config_space(path, 0, 6)
    said = f"0x{int.from_bytes(head[0:2], 'little'):04x}", f"0x{int.from_bytes(head[2:4], 'little'):04x}"
    # the ids of a virtual function read ffff in its own configuration space
    silent = len(head) < 6 or head[4:6] == b"\xff\xff"
    if silent or (said != identity and not sysfs.link(f"{path}/physfn")):
        raise NotCleanError(
            f"device {address} does not answer after its reset", f"it returns {head.hex(' ')}"
        )
    # Memory decoding proves nothing: at close vfio-pci restores the state from when it enabled the function.
    # Bus mastering does: with it a function can write to memory.
    if int.from_bytes(head[COMMAND : COMMAND + 2], "little") & BUS_MASTER:
        raise NotCleanError(
            f"device {address} is a bus master after its reset", "it may still write to memory"
        )
    state = sysfs.text_or_empty(f"{path}/power_state")
    if state in ("D3cold", "error"):
        raise NotCleanError(f"device {address} is in {state} after its reset")
    if complaint:
        raise NotCleanError(f"device {address} did not come back from its reset in time", complaint)


def _follow() -> int:
    """The kernel's log from now on; -1 if it cannot be read."""
    try:
        fd = os.open(KMSG, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        return -1
    return fd


def _complaint(log: int, address: str) -> str:
    """The kernel's message since then about a failed reset; else empty.

    A read gives one record, ``PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT``
    (Documentation/ABI/testing/dev-kmsg).
    """
    found = ""
    while log >= 0:
        try:
            record = os.read(log, 8192)
        except BrokenPipeError:
            continue  # overwritten meanwhile: the next read continues after it
        except BlockingIOError:
            break
        if not record:
            break
        text = record.decode(errors="replace").partition(";")[2]
        if address in text and GIVEN_UP.search(text):
            found = text.splitlines()[0]
    return found
