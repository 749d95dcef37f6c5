# SPDX-License-Identifier: Apache-2.0
"""The network identity of a virtual function: set before a guest has it, reset after.

Always in this order: it is switched off, set, read back, and only then
switched on; and parked in the same order, with an identity that no job has.  What is read
back must be what was written: a driver that takes a setting and drops it would
have a guest in a foreign partition.

There is one implementation for each interface of host drivers (``vf_drivers``).
"""

from __future__ import annotations

from typing import Protocol

from vhpc_slurm.errors import NodeError, TeardownError
from vhpc_slurm.hardware import VfIdentity

PARKED_GUID = (1 << 64) - 1
"""GUID of a parked function; zero would let the firmware choose one."""


class VfError(NodeError):
    """A virtual function did not accept its settings."""


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
        """Give it this identity."""

    def difference(self, identity: VfIdentity) -> str:
        """Read it back: what differs from this identity; empty when nothing does."""

    def park(self) -> None:
        """Give it the parked identity."""

    def why_not_parked(self) -> str:
        """Read it back: why it is not parked; empty when it is."""

    def switch_on(self) -> None:
        """Let it onto its network."""


def configure(vf_driver: VfDriver, address: str, identity: VfIdentity) -> None:
    """Give a function its identity, and let it onto its network.

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
        raise VfError(f"virtual function {address} did not accept its settings", wrong, "see dmesg")


def park(vf_driver: VfDriver, address: str) -> None:
    """Take a function off its network, and give it the parked identity.

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
