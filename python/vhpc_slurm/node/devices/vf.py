# SPDX-License-Identifier: Apache-2.0
"""What a virtual function is on its network: set before a guest has it, taken back after.

Always in this order: it is switched off, set, read back, and only then
switched on; and back the same way, to values that are nobody's.  What is read
back must be what was written: a driver that takes a setting and drops it would
have a guest in a foreign partition.

There is one implementation for each interface of host drivers (``vf_drivers``).
"""

from __future__ import annotations

from typing import Protocol

from vhpc_slurm.errors import NodeError, TeardownError
from vhpc_slurm.hardware import VfIdentity

PARKED_GUID = (1 << 64) - 1
"""Nobody's GUID; zero would let the firmware choose one."""


class VfError(NodeError):
    """A virtual function does not take what it is given."""


class NoVfDriverError(VfError):
    """The driver of the physical function offers no way to set its virtual ones."""


class ParkError(TeardownError):
    """A virtual function may still carry what its last guest had."""


class VfDriver(Protocol):
    """How a host driver sets virtual functions; methods raise OSError for what the kernel refuses."""

    infiniband: bool

    def switch_off(self) -> None:
        """Take the function off its network."""

    def set(self, identity: VfIdentity) -> None:
        """Make it this."""

    def difference(self, identity: VfIdentity) -> str:
        """Read it back: what differs from this identity; empty when nothing does."""

    def park(self) -> None:
        """Make it nobody's."""

    def why_not_parked(self) -> str:
        """Read it back: why it is not parked; empty when it is."""

    def switch_on(self) -> None:
        """Let it onto its network."""


def configure(vf_driver: VfDriver, address: str, identity: VfIdentity) -> None:
    """Make a function what a guest shall have, and let it onto its network.

    Raises:
        VfError: the kernel refused, or something else was read back.
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
        raise VfError(f"virtual function {address} does not take what it is given", wrong, "see dmesg")


def park(vf_driver: VfDriver, address: str) -> None:
    """Take a function off its network, and make it nobody's.

    Raises:
        ParkError: the kernel refused, or something else was read back.
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
    """A GUID as Mellanox's drivers write it."""
    return guid.to_bytes(8, "big").hex(":")


def _text(err: OSError) -> str:
    return f"{err.filename}: {err.strerror}" if err.filename else str(err.strerror or err)
