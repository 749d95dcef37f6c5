# SPDX-License-Identifier: Apache-2.0
"""Partitions of an NVSwitch: sets of GPUs of a node that can communicate by NVLink.

With the shared NVSwitch model the Fabric Manager, on the host or in a service
VM, has a fixed list of partitions.  The one with exactly a guest's GPUs is
activated before the guest starts, and deactivated when it is gone.

The driver in a guest must have exactly the version of the Fabric Manager.

Sources: NVIDIA Fabric Manager User Guide, Shared NVSwitch Virtualization Model; fmpm of
github.com/NVIDIA/Fabric-Manager-Client (``-l`` lists as JSON, ``-a`` activates, ``-d`` deactivates);
``nv-fabricmanager --version`` prints "Fabric Manager version is : 580.95.05".
GPUs are identified there by their module (``physicalId``): a Fabric Manager that does not have
the GPUs does not know their PCI addresses.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from vhpc_slurm.config import Devices
from vhpc_slurm.errors import FabricError, NodeError, UserError
from vhpc_slurm.model import ImageIdentity, NodePlan
from vhpc_slurm.record import Record
from vhpc_slurm.undecodable import UNDECODABLE

PROGRAM = "nv-fabricmanager"
MODULE = "nvidia"
"""The kernel module of NVIDIA's driver."""
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
DIVIDED = (
    "devices.fmpm joins whole GPUs by NVSwitch partitions: a Fabric Manager has one mode, and another one "
    "for parts of GPUs (mdev=, vgpu=)",
    "remove these lines of the map, or devices.fmpm",
)
_VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)+", re.ASCII)


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
        except UNDECODABLE as err:
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
        return _output((*self.argv, *args), self.timeout_s)


def version(config: Devices) -> str:
    """The version of the Fabric Manager; empty if it is not configured, and none is installed here.

    Raises:
        NodeError: the command failed, or printed no version.
    """
    argv = config.fabric_manager
    if not argv:
        found = shutil.which(PROGRAM, path=_PATH)
        if found is None:
            return ""
        argv = (found, "--version")
    said = _output(argv, config.timeout_s)
    numbers = _VERSION.search(said.decode(errors="replace"))
    if numbers is None:
        raise NodeError(f"{' '.join(argv)} printed no version", repr(said[:80]), "see devices.fabric_manager")
    return numbers[0]


def check(config: Devices, plan: NodePlan, image: ImageIdentity) -> None:
    """Check that the guests of a plan work on an NVSwitch that is shared between jobs.

    An image without NVIDIA's driver, or with one of unknown version, is not judged.

    Raises:
        UserError: the image has another version of the driver than the Fabric Manager.
        NodeError: a guest has a part of a GPU, or the version cannot be read.
    """
    devices = [device for guest in plan.guests for device in guest.devices if device.traits.indexed]
    if not config.fmpm or not devices:
        return
    parts = [device.function for device in devices if not device.traits.nvswitch]
    if parts:
        raise NodeError(f"the GPU map of {plan.node} divides {', '.join(dict.fromkeys(parts))}", *DIVIDED)
    has, needs = dict(image.manifest.driver_versions).get(MODULE, ""), version(config)
    if has and needs and has != needs:
        raise UserError(
            f"image {image.ref} has NVIDIA's driver {has}",
            f"the Fabric Manager of {plan.node} has version {needs}, and GPUs there need this driver",
            "choose another image, see: vhpc image show",
        )


def _output(argv: Sequence[str], timeout_s: float) -> bytes:
    what = " ".join(argv)
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            cwd="/",
            env={"PATH": _PATH, "LC_ALL": "C.UTF-8"},
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
