# SPDX-License-Identifier: Apache-2.0
"""vhpc plan: the plan of Prolog on this node, or every reason for a refusal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from vhpc_slurm.architecture import of_machine
from vhpc_slurm.catalog import Owner, resolve_for
from vhpc_slurm.cli import context, leases, options, output
from vhpc_slurm.cli.host import planchecks, planview
from vhpc_slurm.cli.host.planview import NO_JOB
from vhpc_slurm.cli.jobs import environment
from vhpc_slurm.cli.options import Json, ThisNode
from vhpc_slurm.config import Config
from vhpc_slurm.cpulist import parse_cpu_list
from vhpc_slurm.device import NodeDevices, PassthroughDevice
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.model import (
    Generation,
    GresAllocation,
    GuestPlan,
    ImageRef,
    JobRequest,
    NodeAllocation,
    NodePlan,
    RunningGuest,
    Share,
)
from vhpc_slurm.node import plan as node_plan
from vhpc_slurm.node.devices import assignment, classes, gpumap
from vhpc_slurm.node.guest import shares
from vhpc_slurm.node.host import accounts, inventory
from vhpc_slurm.node.resource import reservations
from vhpc_slurm.node.store.layout import Layout
from vhpc_slurm.options import ENVIRONMENT, IMAGE, OPTIONS, VFS
from vhpc_slurm.placement.input import PlanInput
from vhpc_slurm.placement.plan import Refusal
from vhpc_slurm.placement.usage import NOTHING, Usage, fold
from vhpc_slurm.policy import visible_shares

JobHere = Annotated[
    int | None,
    typer.Argument(metavar="JOBID", min=1, help="A job on this node; its lease gives its allocation."),
]
ImageName = Annotated[
    str | None,
    typer.Option(
        "--image", metavar="NAME[:TAG][@DIGEST]", help="Without JOBID: the image of a job that you describe."
    ),
]
CpuIds = Annotated[
    str | None,
    typer.Option("--cpus", metavar="LIST", help="With --image: Slurm's CPU ids, like 0-3,8; default all."),
]
MemoryMib = Annotated[
    int | None,
    typer.Option("--memory", metavar="MIB", min=1, help="With --image: memory of the job here; default all."),
]
UserName = Annotated[
    str | None,
    typer.Option(
        "--user", metavar="USER", help="With --image: user of the job; default you, unless you are root."
    ),
]
WorkDir = Annotated[
    str | None,
    typer.Option(
        "--chdir",
        metavar="DIR",
        help="With --image: working directory of the job; default here.",
    ),
]
GpuIndexes = Annotated[
    str | None,
    typer.Option("--gpus", metavar="LIST", help="With --image: indexes of the GPUs that Slurm allocates."),
]
AsXml = Annotated[bool, typer.Option("--xml", help="Print the libvirt domain XML of each guest.")]


@dataclass(frozen=True)
class Wish:
    """A hypothetical allocation; None means all that the node has.

    ``asked`` has values of options of sbatch, by the field of ``JobRequest``.
    """

    image: str
    cpus: str | None = None
    memory_mib: int | None = None
    user: str | None = None
    work_dir: str = "/"
    gpus: str | None = None
    asked: Mapping[str, Any] = field(default_factory=dict)


@options.sbatch([one for one in OPTIONS if one.plan], "With --image: {0.plan}.".format)
def plan(
    job_id: JobHere = None,
    image: ImageName = None,
    cpus: CpuIds = None,
    memory: MemoryMib = None,
    user: UserName = None,
    chdir: WorkDir = None,
    gpus: GpuIndexes = None,
    *,
    asked: Mapping[str, Any],
    xml: AsXml = False,
    node: ThisNode = None,
    as_json: Json = False,
) -> int:
    """Show the plan of Prolog on this node, for a job or for one that you describe; or why it is refused."""
    if ENVIRONMENT.field in asked and job_id is None:
        image, asked = with_file(image, asked)
    wishes = (image, cpus, memory, user, chdir, gpus, asked or None)
    if (job_id is None) == (image is None):
        raise typer.BadParameter("either JOBID or --image is needed")
    if job_id is not None and any(wish is not None for wish in wishes):
        raise typer.BadParameter("JOBID excludes --cpus, --memory and the like: the job has its allocation")
    config, name = options.config(), context.node_name(node)
    if job_id is not None:
        case = of_job(config, job_id, name)
    else:
        work_dir = chdir or os.getcwd()  # noqa: PTH109
        case = of_wish(config, Wish(image or "", cpus, memory, user, work_dir, gpus, asked), name)
    return show(config, case, xml=xml, as_json=as_json)


def with_file(image: str | None, asked: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The image and the values of options, with those of the environment file that the values name.

    Raises:
        UserError: the file cannot be read, or is wrong.
    """
    values, taken = dict(asked), []
    for option, text in environment.read(asked[ENVIRONMENT.field]):
        if option is IMAGE and image is None:
            image = text
        elif option.fields and option.field not in asked:
            values |= option.values(text)
        else:
            continue
        taken.append(option.name)
    return image, {**values, "from_file": tuple(taken)}


def of_job(config: Config, job_id: int, node: str) -> PlanInput:
    """The case of an existing job on this node, from its lease.

    Raises:
        UserError: no such job, not on this node, or refused.
        FabricError: vhpcd cannot be reached.
    """
    context.need_listener("plan JOBID", config)
    record = leases.of_job(config, job_id)
    if record is None:
        raise leases.unknown(job_id)
    lease = record.lease
    if lease.image is None:
        raise UserError(f"job {job_id} was refused", lease.refusal)
    names = lease.allocation.node_names
    if node not in names:
        raise UserError(
            f"job {job_id} has no allocation on {node}",
            f"its nodes are {output.node_list(names)}",
            "vhpc plan needs the topology of the node: run it there",
        )
    host = inventory.read_inventory(node, config)
    found, notes = _shares(config, lease.request)
    usage = _usage(config, lease.generation)
    return node_plan.of_lease(lease, host, found, usage, _devices(config), notes)


def of_wish(config: Config, wish: Wish, node: str) -> PlanInput:
    """The case of a hypothetical allocation.

    Raises:
        UserError: unknown image or user, or an invalid CPU list.
    """
    host = inventory.read_inventory(node, config)
    try:
        cpus = tuple(range(len(host.abstract))) if wish.cpus is None else parse_cpu_list(wish.cpus)
    except ValueError as err:
        raise UserError(f"--cpus={wish.cpus!r}", str(err), "write it like 0-3,8") from err
    gres, given = _gres(config, wish)
    memory = host.memory_mib if wish.memory_mib is None else wish.memory_mib
    uid, notes = _uid(wish.user)
    user = wish.user or context.user_name(uid)
    ref, emulated = ImageRef.parse(wish.image), config.guests.emulated
    image = resolve_for(config.images, ref, Owner(user, uid), host.arch, emulated)
    request = JobRequest(
        job_id=NO_JOB,
        restart=0,
        uid=uid,
        gid=0,
        user=user,
        work_dir=wish.work_dir,
        image=image.ref,
        **wish.asked,
    )
    found, more = _shares(config, request) if uid else ((), ())
    generation = Generation(NO_JOB, 0, "00000000")
    allocation = NodeAllocation(node, cpus, memory, gres)
    return PlanInput(
        generation, allocation, host, request, image, found, devices=given, notes=(*notes, *more)
    )


def _usage(config: Config, generation: Generation) -> Usage:
    """Resources that other jobs hold here, which only root can see."""
    return fold(reservations.live(Layout(config), excluding=generation)) if context.is_root() else NOTHING


def _devices(config: Config) -> NodeDevices:
    """Devices that jobs may get; only root can see which are in quarantine."""
    if context.is_root():
        return assignment.handed_out(Layout(config))
    gpus = gpumap.read_gpu_map(Path(config.placement.gpu_map))
    return NodeDevices(gpus, parents=classes.parents(Layout(config)))


def _gres(config: Config, wish: Wish) -> tuple[tuple[GresAllocation, ...], NodeDevices | None]:
    """The requested generic resources, and the devices that jobs may get."""
    if wish.gpus is None and VFS.field not in wish.asked:
        return (), None
    try:
        indexes = parse_cpu_list(wish.gpus or "")
    except ValueError as err:
        raise UserError(f"--gpus={wish.gpus!r}", str(err), "write it like 0-3,8") from err
    gres = GresAllocation(config.placement.gpu_gres, "", len(indexes), indexes)
    return (gres,) if indexes else (), _devices(config)


def show(config: Config, case: PlanInput, *, xml: bool, as_json: bool) -> int:
    """Show the plan of a case.

    Raises:
        VhpcError: no plan is possible; its kind is that of the deciding reason.
    """
    result = node_plan.make(Layout(config), case)
    if isinstance(result, NodePlan):
        result = planchecks.checked(config, case, result)
    if isinstance(result, Refusal):
        planview.refusal(case, result, as_json=as_json)
        raise result.error()
    if xml:
        texts = [_xml(config, case, result, guest) for guest in result.guests]
        if as_json:
            output.write_json({"xml": texts})
        else:
            print("".join(texts), end="")
        return 0
    if as_json:
        output.write_json(_json(config, case, result))
    else:
        planview.show(case, result, _accelerator(config, case), config.guests.libvirt_uri)
    return 0


def _uid(user: str | None) -> tuple[int, tuple[str, ...]]:
    """Uid of the job's user; 0 (root has no jobs in guests) if no user is named."""
    import pwd

    if user is None:
        if context.is_root():
            return 0, ("shares are left out: they depend on the user, name one with --user",)
        return os.geteuid(), ()
    try:
        return pwd.getpwnam(user).pw_uid, ()
    except KeyError:
        raise UserError(f"user {user!r} is unknown on this node") from None


def _shares(config: Config, request: JobRequest) -> tuple[tuple[Share, ...], tuple[str, ...]]:
    """The shares of this user's guests here, and notes about omitted ones.

    The access to a folder is tried with the user's own rights, which only root can assume.
    """
    account, work_dir = accounts.account(request.uid), request.work_dir
    settings = visible_shares(config, request)
    program, timeout = f"{config.paths.libexec}/vhpc-confine", config.guests.stage_timeout_s
    if not context.is_root() or not os.access(program, os.X_OK):
        found, notes = shares.wanted(settings, account, work_dir)
        notes.append(f"whether {account.name} may enter them was not checked: that needs root and {program}")
        return tuple(found), tuple(notes)
    real = shares.real_work_dir(work_dir, program, account, timeout)
    found, notes = shares.wanted(settings, account, real)
    why = {share: shares.attempt(share.path, program, account, timeout).why_not for share in found}
    notes += [f"{share.why} {share.path!r} is not shared: {text}" for share, text in why.items() if text]
    found = [share for share, text in why.items() if not text]
    return tuple(found), tuple(notes)


def _hypervisor(config: Config, arch: str) -> tuple[int, str]:
    """libvirt's version, and a remark if it could not be queried."""
    from vhpc_slurm.node.guest import libvirtd

    try:
        with libvirtd.connect(config.guests.libvirt_uri, config.guests.stage_timeout_s) as hypervisor:
            return hypervisor.version()[0], ""
    except (VhpcError, ImportError) as err:
        oldest = of_machine(arch).libvirt_oldest
        return oldest, f"for the oldest supported libvirt; the running one was not queried: {err}"


def _xml(config: Config, case: PlanInput, plan_: NodePlan, guest: GuestPlan) -> str:
    """The domain as Prolog makes it, but with the first uid of the range, because Prolog allocates it."""
    from vhpc_slurm.domain.render import render
    from vhpc_slurm.node.boot.spec import domain_spec

    version, remark = _hypervisor(config, case.image.manifest.arch)
    mtu = plan_.segment.mtu if plan_.segment else 0
    running = RunningGuest(guest, config.guests.uid_base, plan_.shares, mtu)
    text = render(domain_spec(config, plan_, running, case.host, case.image, version))
    return f"<!-- {remark.replace('--', '- -')} -->\n{text}" if remark else text


def _accelerator(config: Config, case: PlanInput) -> tuple[str, str]:
    """(kvm or tcg, why)."""
    why = case.host.kvm_reason
    if config.guests.accelerator == "auto" and not case.host.kvm and not context.is_root():
        why += f"; checked as {context.user_name()}, while Prolog checks as root"
    return ("kvm" if case.host.kvm else "tcg"), why


def _identity(device: PassthroughDevice) -> dict[str, Any] | None:
    """A virtual function's identity in the usual notations; None if it has none."""
    own = device.identity
    if own is None:
        return None
    if own.mac:
        return {"mac": own.mac.hex(":"), "vlan": own.vlan}
    return {
        "node_guid": f"{own.node_guid:016x}",
        "port_guid": f"{own.port_guid:016x}",
        "pkey": f"{own.pkey:#06x}",
    }


def _json(config: Config, case: PlanInput, plan_: NodePlan) -> dict[str, Any]:
    """The NodePlan with its inputs."""
    accelerator, why = _accelerator(config, case)
    abstract = {os_cpu: number for number, os_cpu in enumerate(case.host.abstract)}
    built: dict[str, Any] = msgspec.to_builtins(plan_)
    for guest in built["guests"]:
        for pin in guest["pins"]:
            pin["abstract"] = abstract[pin["os_cpu"]]
        guest["port_guids"] = [f"{guid:016x}" for guid in guest["port_guids"]]
    for built_guest, guest_plan in zip(built["guests"], plan_.guests, strict=True):
        for row, device in zip(built_guest["devices"], guest_plan.devices, strict=True):
            row.update(address=row.pop("key"), role=row.pop("device_class"), identity=_identity(device))
    return built | {
        "generation": None if case.generation.job_id == NO_JOB else str(plan_.generation),
        "image": str(case.image.ref),
        "digest": case.image.digest,
        "accelerator": accelerator,
        "accelerator_reason": why,
        "libvirt_uri": config.guests.libvirt_uri,
        "notes": [*plan_.notes, *case.notes],
    }
