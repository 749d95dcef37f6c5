"""Allocation + inventory + policy -> ``NodePlan``, or every reason why not."""

from __future__ import annotations

from dataclasses import dataclass

from vhpc_slurm.config import Config
from vhpc_slurm.cpulist import parse_cpu_list
from vhpc_slurm.errors import NodeError, UserError, VhpcError
from vhpc_slurm.model import (
    Generation,
    GuestCell,
    GuestPlan,
    HostInventory,
    ImageManifest,
    JobRequest,
    NodeAllocation,
    NodePlan,
)
from vhpc_slurm.placement.cpu import CpuPlacement, EmulatorPlacement, place_cpus, place_emulator
from vhpc_slurm.placement.memory import MemorySize, place_memory, size_memory

ROOT_FORMATS = ("erofs", "squashfs", "ext4")  # what a raw, read-only disk may hold


@dataclass(frozen=True)
class Refusal:
    """Why there is no plan: all reasons, users' and nodes' alike, in the order found."""

    reasons: tuple[VhpcError, ...]

    def error(self) -> UserError | NodeError:
        """The reasons as one error.

        A user's mistake outweighs a node's fault: that job fails on every node,
        and its own user is the only one who can help it.  Only reasons of the
        kind that is raised are in its text.
        """
        users = [reason for reason in self.reasons if isinstance(reason, UserError)]
        if users:
            return UserError(*_merged(users))
        return NodeError(*_merged(self.reasons))


def _merged(reasons: list[UserError] | tuple[VhpcError, ...]) -> tuple[str, str, str]:
    first = reasons[0]
    if len(reasons) == 1:
        return first.what, first.why, first.cure
    return "; ".join(reason.line() for reason in reasons), "", ""


def plan_node(
    generation: Generation,
    allocation: NodeAllocation,
    host: HostInventory,
    request: JobRequest,
    manifest: ImageManifest,
    config: Config,
) -> NodePlan:
    """The plan of one node.

    Raises:
        UserError: the job cannot run as it was asked for, on any node.
        NodeError: this node does not match what Slurm or the site says of it.
    """
    result = fit(generation, allocation, host, request, manifest, config)
    if isinstance(result, Refusal):
        raise result.error()
    return result


def fit(
    generation: Generation,
    allocation: NodeAllocation,
    host: HostInventory,
    request: JobRequest,
    manifest: ImageManifest,
    config: Config,
) -> NodePlan | Refusal:
    """The plan of one node, or all reasons why there is none; raises nothing."""
    reasons = _image_errors(manifest, host)
    cpus, errors = place_cpus(allocation, host)
    reasons += errors
    emulator = None
    if cpus is not None:
        emulator, errors = _emulator(cpus, host, config)
        reasons += errors
    memory, errors = size_memory(allocation, request, manifest, host, config.guests.memory_reserve_mib)
    reasons += errors
    if reasons or cpus is None or emulator is None or memory is None:
        return Refusal(tuple(reasons))
    return _node_plan(generation, allocation, host, cpus, emulator, memory)


def _image_errors(manifest: ImageManifest, host: HostInventory) -> list[VhpcError]:
    errors: list[VhpcError] = []
    image = f"image {manifest.name}:{manifest.tag}"
    if manifest.arch != host.arch:
        errors.append(UserError(f"{image} is for {manifest.arch}, {host.node} is {host.arch}"))
    if manifest.root_format not in ROOT_FORMATS:
        errors.append(
            UserError(
                f"{image} has a root of format {manifest.root_format!r}",
                f"guests boot {', '.join(ROOT_FORMATS)}",
                "rebuild the image",
            )
        )
    return errors


def _emulator(
    cpus: CpuPlacement, host: HostInventory, config: Config
) -> tuple[EmulatorPlacement | None, list[VhpcError]]:
    try:
        configured = parse_cpu_list(config.host.emulator_cpus)
    except ValueError as err:
        return None, [NodeError("host.emulator_cpus is not valid", str(err), "write it like 0-1,64-65")]
    return place_emulator(configured, cpus, host)


def _node_plan(
    generation: Generation,
    allocation: NodeAllocation,
    host: HostInventory,
    cpus: CpuPlacement,
    emulator: EmulatorPlacement,
    memory: MemorySize,
) -> NodePlan:
    where = place_memory(cpus.os_cpus, memory.guest_mib, host)
    cell = GuestCell(
        cell=0,
        vcpus=tuple(pin.vcpu for pin in cpus.pins),
        memory_mib=memory.guest_mib,
        host_cell=where.host_cell,
        nodeset=where.nodeset,
    )
    guest = GuestPlan(
        index=0,
        hostname=allocation.node,
        pins=cpus.pins,
        topology=cpus.topology,
        cells=(cell,),
        memory_mib=memory.guest_mib,
        emulator_cpus=emulator.cpus,
        emulator_choice=emulator.choice,
        memory_binding=where.binding,
    )
    return NodePlan(
        generation=generation,
        node=host.node,
        guests=(guest,),
        job_memory_mib=allocation.memory_mib,
        reserve_mib=memory.reserve_mib,
        notes=(*cpus.notes, *where.notes),
    )
