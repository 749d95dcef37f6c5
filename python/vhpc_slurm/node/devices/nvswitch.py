# SPDX-License-Identifier: Apache-2.0
"""Partitions of an NVSwitch: sets of GPUs of a node that can communicate by NVLink.

With the shared NVSwitch model the Fabric Manager, on the host or in a service
VM, has a fixed list of partitions.  The one with exactly a guest's GPUs is
activated before the guest starts, and deactivated when it is gone.

Sources: NVIDIA Fabric Manager User Guide, Shared NVSwitch Virtualization Model; fmpm of
github.com/NVIDIA/Fabric-Manager-Client (``-l`` lists as JSON, ``-a`` activates, ``-d`` deactivates).
GPUs are identified there by their module (``physicalId``): a Fabric Manager that does not have
the GPUs does not know their PCI addresses.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from typing import Protocol

import msgspec

from vhpc_slurm.config import Devices
from vhpc_slurm.errors import UNDECODABLE, FabricError, NodeError, UserError
from vhpc_slurm.record import Record


class _Gpu(msgspec.Struct, frozen=True, rename="camel"):
    physical_id: int


class _FmPartition(msgspec.Struct, frozen=True, rename="camel"):
    partition_id: int
    is_active: int
    gpu_info: tuple[_Gpu, ...] = ()


class _Partitions(msgspec.Struct, frozen=True, rename="camel"):
    partition_info: tuple[_FmPartition, ...] = ()


class NvSwitchPartition(Record, frozen=True):
    """A partition: its number, the modules of its GPUs, and whether it is active."""

    number: int
    modules: frozenset[int]
    active: bool


class Provider(Protocol):
    """The service that manages the partitions; methods raise NodeError if it cannot be reached."""

    def partitions(self) -> tuple[NvSwitchPartition, ...]:
        """All partitions."""

    def activate(self, number: int) -> None:
        """Activate a partition, so that its GPUs can communicate."""

    def deactivate(self, number: int) -> None:
        """Deactivate a partition."""


class Fmpm:
    """NVIDIA's command ``fmpm``."""

    def __init__(self, config: Devices) -> None:
        self.argv, self.timeout_s = config.fmpm, config.timeout_s

    def partitions(self) -> tuple[NvSwitchPartition, ...]:
        """All partitions, by ``-l``."""
        said = self._run("-l")
        try:
            found = msgspec.json.decode(said, type=_Partitions)
        except (msgspec.ValidationError, *UNDECODABLE) as err:
            raise NodeError(
                "the list of NVSwitch partitions cannot be read", str(err), "see devices.fmpm"
            ) from err
        return tuple(
            NvSwitchPartition(
                one.partition_id, frozenset(gpu.physical_id for gpu in one.gpu_info), bool(one.is_active)
            )
            for one in found.partition_info
        )

    def activate(self, number: int) -> None:
        """Activate a partition, by ``-a``."""
        self._run("-a", str(number))

    def deactivate(self, number: int) -> None:
        """Deactivate a partition, by ``-d``."""
        self._run("-d", str(number))

    def _run(self, *args: str) -> bytes:
        what = " ".join((*self.argv, *args))
        try:
            done = subprocess.run(
                [*self.argv, *args],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self.timeout_s,
                check=False,
                cwd="/",
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
            )
        except (OSError, subprocess.TimeoutExpired) as err:
            raise NodeError(f"{what} failed", str(err), "is the Fabric Manager running?") from err
        if done.returncode:
            words = (done.stderr or done.stdout).decode(errors="replace").strip()[-200:]
            raise NodeError(f"{what} failed", words or f"status {done.returncode}", "see fabricmanager.log")
        return done.stdout


def choose(partitions: Iterable[NvSwitchPartition], modules: frozenset[int], node: str) -> NvSwitchPartition:
    """The partition with exactly these GPUs.

    Raises:
        UserError: no partition has this number of GPUs.
        FabricError: no partition has these GPUs, but some have this number: Slurm may choose one next time.
    """
    there = tuple(partitions)
    for one in there:
        if one.modules == modules:
            return one
    sizes = sorted({len(one.modules) for one in there})
    names = ", ".join(map(str, sorted(modules)))
    if len(modules) not in sizes:
        raise UserError(
            f"a guest on {node} would have {len(modules)} GPUs",
            f"the NVSwitch there joins {' or '.join(map(str, sizes)) or 'no'} of them",
            "request one of these numbers",
        )
    raise FabricError(
        f"the NVSwitch of {node} has no partition of the GPUs with modules {names}",
        "Slurm chose them",
        "tell Slurm in gres.conf which GPUs are near each other: Cores=, Links=",
    )


def is_active(provider: Provider, number: int) -> bool:
    """Whether a partition is active."""
    return any(one.active for one in provider.partitions() if one.number == number)
