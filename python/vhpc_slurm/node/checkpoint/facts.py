# SPDX-License-Identifier: Apache-2.0
"""Facts about a node's guests that a checkpoint needs; the boot writes it when they are ready."""

from __future__ import annotations

from pathlib import Path

import msgspec

from vhpc_slurm import files
from vhpc_slurm.config import Config
from vhpc_slurm.errors import NodeError
from vhpc_slurm.model import Generation, GuestPlan, HostInventory
from vhpc_slurm.node.host import inventory
from vhpc_slurm.node.host.process import ProcessRef
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.record import Record

EMULATED = "emulated"


class GuestFacts(Record, frozen=True):
    """One guest.

    Attributes:
        index: among the job's guests on the node.
        rank: among all guests of the job, counted node by node from 0.
        hostname: of the guest.
        domain: libvirt's name of it.
        vcpus, memory_mib: its size.
        disk: file of its own disk; empty if it has none.
        shim: its vhpc-shim.
        daemons: of its shared folders.
        snapshots: folders whose snapshots it has, and their files.
    """

    index: int
    rank: int
    hostname: str
    domain: str
    vcpus: int
    memory_mib: int
    disk: str
    shim: ProcessRef
    daemons: tuple[ProcessRef, ...] = ()
    snapshots: tuple[tuple[str, str], ...] = ()


class NodeFacts(Record, frozen=True):
    """The guests of a generation on this node; ``cpu`` is the CPU that they see (``SavedNode.cpu``)."""

    generation: Generation
    node: str
    cpu: str
    guests: tuple[GuestFacts, ...]


def is_saveable(config: Config, guests: tuple[GuestPlan, ...]) -> bool:
    """Whether these guests can be saved: the site has checkpoints, and no guest has a device of the host."""
    return bool(config.checkpoint.folder) and not any(guest.devices for guest in guests)


def cpu_of(host: HostInventory) -> str:
    """The CPU that guests of this node see."""
    return f"{host.cpu_vendor} {inventory.cpu_model()}".strip() if host.kvm else EMULATED


def write(layout: Layout, facts: NodeFacts) -> None:
    """Keep the facts in the job's run folder; OSError if that fails."""
    files.replace(layout.saveable(facts.generation.job_id), msgspec.json.encode(facts))


def read(layout: Layout, generation: Generation) -> NodeFacts:
    """The facts of a generation.

    Raises:
        NodeError: there are none, or the guests are those of another generation.
    """
    path: Path = layout.saveable(generation.job_id)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=NodeFacts)
    except (OSError, msgspec.MsgspecError) as err:
        raise NodeError(f"the guests of generation {generation} cannot be saved", f"{path}: {err}") from err
    if found.generation != generation:
        raise NodeError(f"the guests of generation {generation} cannot be saved", f"{path} is of another one")
    return found
