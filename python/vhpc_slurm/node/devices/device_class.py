# SPDX-License-Identifier: Apache-2.0
"""The verbs of a device class: what a node does with its devices, from the first check to the release.

A verb may be killed at any point, and is then called again: each one reads the
current state before it acts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import field

from vhpc_slurm.device import DeviceTraits, PassthroughDevice
from vhpc_slurm.errors import TeardownError
from vhpc_slurm.node.devices.preflight import CheckInput, DeviceError, check_holders
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record

State = dict[str, Any]
"""What a release needs; it is in the journal, so it has only values of JSON."""


class NotCleanError(TeardownError):
    """A device may not be in the state that its next user needs."""


class HostState(Record, frozen=True):
    """Paths of the node's files, and the holders of devices; tests use other values."""

    held: Mapping[str, str] = field(default_factory=dict)
    proc: Path = Path("/proc")
    dev: str = "/dev"


def check_closed(case: CheckInput, key: str, group: int, driver: str = "") -> None:
    """Check that no process has a device open that is to be released; TeardownError if one has."""
    try:
        check_holders(case, key, group, driver)
    except DeviceError as err:
        raise TeardownError(f"device {key} cannot be released", err.line()) from err


class DeviceClass(ABC):
    """A class of devices on a node.

    Attributes:
        traits: what is the same on every host; their name is that of the class.
        noun: of a device, in messages.
        unparked: the consequence of a failed ``disconnect`` or ``park``, in messages.
    """

    traits: DeviceTraits
    noun = "device"
    unparked = "is not parked"

    def parents(self, layout: Layout) -> Iterable[tuple[str, str]]:  # noqa: ARG002 - for other classes
        """Key and PCI address of the parent of each device that is not a PCI function."""
        return ()

    @abstractmethod
    def exists(self, layout: Layout, key: str) -> bool:
        """Whether the node has the device; for one that ``prepare`` creates, whether it can be created."""

    @abstractmethod
    def check(self, case: CheckInput, key: str) -> State:
        """Check that a guest may get the device, and read what a release will restore; changes nothing.

        Raises:
            DeviceError: a guest may not have it; ``NODE_WIDE`` and ``PASSING`` have their own meaning.
            StuckError: the kernel does not answer.
        """

    def offered(self, case: CheckInput, key: str) -> None:  # noqa: B027 - the others exist always
        """Check that the node has the device or can create it as the GPU map says: a part of ``check``.

        Raises:
            DeviceError: it cannot.
            StuckError: the kernel does not answer.
        """

    @abstractmethod
    def prepare(self, layout: Layout, device: PassthroughDevice, state: State) -> None:
        """Make the device ready for its guest: create or bind it, and give it its identity.

        Raises:
            StuckError: the kernel does not answer; the device goes into quarantine.
            NodeError: the kernel refused.
        """

    def disconnect(self, layout: Layout, key: str) -> None:  # noqa: B027 - the others reach nothing
        """Disconnect the device from the network of its job; the guest may still have it.

        Raises:
            VhpcError, OSError: it may still be connected.
        """

    def idle(self, layout: Layout) -> Iterable[str]:  # noqa: ARG002 - for other classes
        """Keys of the devices on this node that must be parked if no job holds them."""
        return ()

    def why_not_parked(self, layout: Layout, key: str) -> str:  # noqa: ARG002 - for other classes
        """Why an idle device is not parked; empty if it is parked or cannot be read."""
        return ""

    def park(self, layout: Layout, key: str) -> None:
        """Park a device that no job holds: disconnect it, or remove it if ``prepare`` creates it.

        Raises:
            VhpcError, OSError: it may not be parked.
        """
        self.disconnect(layout, key)

    @abstractmethod
    def release(self, layout: Layout, key: str, state: State, host: HostState) -> None:
        """Check the device for errors during the job, reset, verify and clear it, and restore its state.

        Idempotent, also for a device that was announced but not changed.

        Raises:
            NotCleanError, StuckError, OSError: a check failed; the device goes into quarantine.
            TeardownError: a process still has it open.
        """

    @abstractmethod
    def clear(self, case: CheckInput, layout: Layout, key: str, state: State) -> None:
        """Check a device in quarantine, disconnect, reset, verify and clear it, and restore its state.

        ``state`` is empty if the device went into quarantine before anything was changed.

        Raises:
            NodeError, TeardownError, OSError: a check failed.
        """

    def lane(self, key: str) -> str:
        """Devices of one lane are released one after the other, others in parallel."""
        return key
