# SPDX-License-Identifier: Apache-2.0
"""The network identity of a virtual function: set before a guest has it, reset after.

The order is always: switch the link off, set the identity, read it back, and only
then switch the link on.  Parking has the same order, with an identity of no job.
The values read must equal the values written: a driver that accepts and ignores
a setting would put a guest into another job's partition.

There is one implementation for each interface of host drivers (``vf_drivers``).
"""

from __future__ import annotations

from typing import Protocol

from vhpc_slurm.device import VfIdentity
from vhpc_slurm.errors import NodeError, TeardownError

PARKED_GUID = (1 << 64) - 1
"""GUID of a parked function; with zero the firmware would choose one."""


class VfError(NodeError):
    """A virtual function did not accept its settings."""


class NoVfDriverError(VfError):
    """The driver of the physical function has no interface to configure its virtual functions."""


class ParkError(TeardownError):
    """A virtual function may still have the identity of its last guest."""


class VfDriver(Protocol):
    """Interface of a host driver for virtual functions; methods raise OSError if the kernel refuses."""

    infiniband: bool

    def switch_off(self) -> None:
        """Disconnect the function from its network."""

    def set(self, identity: VfIdentity) -> None:
        """Set this identity."""

    def difference(self, identity: VfIdentity) -> str:
        """Read the identity back: how it differs from this one; empty if it does not."""

    def park(self) -> None:
        """Set the parked identity."""

    def why_not_parked(self) -> str:
        """Read the identity back: why it is not parked; empty if it is."""

    def switch_on(self) -> None:
        """Connect the function to its network."""


def configure(vf_driver: VfDriver, address: str, identity: VfIdentity) -> None:
    """Set a function's identity, and connect it to its network.

    Raises:
        VfError: the kernel refused, or other values were read back.
    """
    try:
        vf_driver.switch_off()
        vf_driver.set(identity)
        wrong = vf_driver.difference(identity)
        if not wrong:
            vf_driver.switch_on()
    except OSError as err:
        raise VfError(f"virtual function {address} cannot be set", _text(err), "see dmesg") from err
    if wrong:
        raise VfError(f"virtual function {address} did not accept its settings", wrong, "see dmesg")


def park(vf_driver: VfDriver, address: str) -> None:
    """Disconnect a function from its network, and set the parked identity.

    Raises:
        ParkError: the kernel refused, or other values were read back.
    """
    try:
        vf_driver.switch_off()
        vf_driver.park()
        wrong = vf_driver.why_not_parked()
    except OSError as err:
        raise ParkError(f"virtual function {address} cannot be parked", _text(err), "see dmesg") from err
    if wrong:
        raise ParkError(f"virtual function {address} is not parked", wrong, "see dmesg")


def colons(guid: int) -> str:
    """A GUID in the notation of Mellanox's drivers."""
    return guid.to_bytes(8, "big").hex(":")


def _text(err: OSError) -> str:
    return f"{err.filename}: {err.strerror}" if err.filename else str(err.strerror or err)
