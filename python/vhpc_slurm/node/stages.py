# SPDX-License-Identifier: Apache-2.0
"""The walk through a plan: from a lease to a guest that is ready for tasks.

Each stage announces in the journal what it takes, takes it, and is timed.  A
failure leaves everything to the journal's releases; nothing is undone here.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from vhpc_slurm.domain.render import render
from vhpc_slurm.domain.spec import DomainSpec, ShareSpec
from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.hardware import PassthroughDevice
from vhpc_slurm.model import GuestPlan, HostInventory, ImageIdentity, Lease, NodePlan
from vhpc_slurm.node import resources
from vhpc_slurm.node.devices import assignment, gpumap, identities, nvswitch
from vhpc_slurm.node.guest import console, deadlines, memory, ports, qemulog, refusal, shares
from vhpc_slurm.node.guest.channel import ChannelError, ChannelRefusedError, ChannelSilentError, GuestChannel
from vhpc_slurm.node.guest.helpers import ROOT_SOCKET, Helpers
from vhpc_slurm.node.guest.libvirtd import DomainRefusedError, Hypervisor
from vhpc_slurm.node.host import accounts, process
from vhpc_slurm.node.host.cgroup import Cgroup, limits_of
from vhpc_slurm.node.store import images, reservations, uids
from vhpc_slurm.node.store.journal import Journal, Stopped
from vhpc_slurm.node.store.layout import Layout, domain_name
from vhpc_slurm.node.store.timeline import Recorder
from vhpc_slurm.placement import nccl
from vhpc_slurm.placement.usage import fold

MEMORY = "memory"
"""Its key in the journal."""
ASK_S = 10.0
"""How often a boot asks whether its job goes on: slurmd begins no Epilog before the Prolog has ended."""
log = logging.getLogger("vhpc")


@dataclass
class GuestMemory:
    """Memory of all guests: uids whose processes may have it, and its memfds."""

    owners: list[int]
    inodes: set[memory.Inode]


@dataclass
class Boot:
    """Everything one boot works with; stages fill in what later stages need."""

    layout: Layout
    lease: Lease
    image: ImageIdentity
    plan: NodePlan
    inventory: HostInventory
    journal: Journal
    recorder: Recorder
    account: accounts.Account
    hypervisor: Hypervisor
    replan: Callable[[frozenset[str]], NodePlan] | None = None
    """Makes and reserves another plan, without what is in quarantine by now and these addresses."""
    over: Callable[[], bool] = lambda: False
    """Whether the job has ended meanwhile."""
    shares: list[shares.Share] = field(default_factory=list)
    """Folders that the job's guests are to see."""
    staged: images.StagedImage | None = None
    cgroup: Cgroup | None = None
    memory: GuestMemory = field(default_factory=lambda: GuestMemory([], set()))
    helpers: dict[int, Helpers] = field(default_factory=dict)
    """By guest."""

    def run_dir(self, guest: GuestPlan) -> Path:
        """Run folder of one guest."""
        return self.layout.guest(self.lease.generation.job_id, guest.index)


def boot(work: Boot) -> None:
    """Bring all guests of a node plan up, ready for tasks.

    Raises:
        UserError: the image will not boot, or is broken, or libvirt refuses a guest of this job.
        NodeError: this node cannot do it.
        QuarantinedError: a device got stuck; it is in quarantine.
        Stopped: the job was ended meanwhile.
    """
    refusal.check_vcpus(work.hypervisor, work.plan.guests, work.inventory, work.layout.config.guests.emulator)
    with work.recorder.stage("image", work.image.digest):
        _stage_image(work)
    with work.recorder.stage("shares"):
        _choose_shares(work)
    _make_cgroup(work)
    # released after all guests have ended: what is charged to the control group is theirs together
    work.memory.owners.append(work.account.uid)
    work.journal.acquire(resources.MEMORY, MEMORY, owners=work.memory.owners)
    if taken := _devices(work.plan):
        with work.recorder.stage("devices", " ".join(device.address for device in taken)):
            _take_devices(work)
    try:
        started = []
        for guest in work.plan.guests:
            with work.recorder.stage(f"start g{guest.index}", guest.emulator_choice):
                _start_guest(work, guest)
                started.append((guest, time.monotonic()))
        for guest, since in started:
            with work.recorder.stage(f"agent g{guest.index}"):
                channel = _reach_agent(work, guest, since)
            with channel, work.recorder.stage(f"setup g{guest.index}"):
                _set_up(work, guest, channel)
    finally:
        for helpers in work.helpers.values():
            helpers.close()


def agent_socket(run_dir: Path) -> Path:
    """Where libvirt listens for the host side of the agent's port."""
    return run_dir / "channel" / "agent.sock"


def _stage_image(work: Boot) -> None:
    digest = work.image.digest
    work.journal.acquire(resources.IMAGE, f"image:{digest}", digest=digest)
    images.pin(work.layout, work.image, str(work.lease.generation))

    def go_on() -> None:
        if work.over():
            raise Stopped(f"generation {work.lease.generation} was ended")

    work.staged = images.stage(work.layout, work.image, go_on)


def _choose_shares(work: Boot) -> None:
    config = work.layout.config
    program = f"{config.paths.libexec}/vhpc-confine"
    timeout = config.guests.stage_timeout_s
    real = shares.real_work_dir(work.lease.request.work_dir, program, work.account, timeout)
    work.shares, _ = shares.wanted(config.shares, work.account, real)


def _make_cgroup(work: Boot) -> None:
    """Where the guests and their helpers will be; made before the first of them."""
    if work.layout.config.guests.cgroups == "off":
        return
    with work.recorder.stage("cgroup"):
        generation = str(work.lease.generation)
        work.journal.acquire(resources.CGROUP, f"cgroup:{generation}")
        work.cgroup = Cgroup.of(generation)
        work.cgroup.create(limits_of(work.plan, work.layout.config.guests))


def _devices(plan: NodePlan) -> list[PassthroughDevice]:
    return [device for guest in plan.guests for device in guest.devices]


def _take_devices(work: Boot) -> None:
    """Bind the job's devices; libvirt takes them as they are (``managed="no"``).

    While virtual functions turn out to be unfit the plan is made again without
    them: each time there are fewer to choose from.
    """
    avoid: frozenset[str] = frozenset()
    while True:
        wanted = identities.of_plan(work.lease, work.plan, work.inventory)
        held = fold(reservations.live(work.layout, excluding=work.lease.generation)).devices
        try:
            assignment.acquire(
                work.layout, work.journal, _devices(work.plan), wanted, assignment.HostState(held)
            )
            break
        except assignment.UnfitError as err:
            if work.replan is None:
                raise
            log.warning("%s; looking for others", err.line())
            avoid |= err.busy
            work.plan = work.replan(avoid)
    config = work.layout.config
    if config.devices.fmpm:
        modules = gpumap.modules(Path(config.placement.gpu_map))
        nvswitch.acquire(nvswitch.Fmpm(config.devices), work.journal, work.plan, modules)


def _start_guest(work: Boot, guest: GuestPlan) -> None:
    """Start one guest with its share daemons."""
    layout = work.layout
    run_dir = work.run_dir(guest)
    run_dir.mkdir(mode=0o711)
    # libvirt makes the agent's socket writable for a whole group: nobody but root gets near it
    agent_socket(run_dir).parent.mkdir(mode=0o700)
    uid = _allocate_uid(work)
    work.memory.owners.append(uid)
    work.journal.update(MEMORY, owners=work.memory.owners)
    limits = limits_of(work.plan, layout.config.guests)
    helpers = Helpers(layout, work.journal, guest, work.account, uid, work.cgroup, limits)
    work.helpers[guest.index] = helpers
    helpers.start_daemons(work.shares)
    console.prepare(run_dir / "console.log", uid)
    name = domain_name(work.lease.generation, guest.index)
    assert work.staged is not None
    boot_files = images.private_copies(work.staged, run_dir)
    spec = _spec(work, guest, uid, boot_files)
    work.journal.acquire(resources.DOMAIN, f"domain:{name}", name=name, uid=uid)
    _create(work, spec, uid)
    for path in boot_files:
        path.unlink()  # QEMU has read them
    for ref in process.of_uid(uid):
        work.memory.inodes |= memory.of_process(ref.pid)
        if work.cgroup is not None:
            work.cgroup.add(ref.pid)
    work.journal.update(MEMORY, inodes=sorted(work.memory.inodes))


def _allocate_uid(work: Boot) -> int:
    announced: list[str] = []

    def announce(uid: int) -> None:
        """Journal first; a number that another job took meanwhile is crossed out again."""
        if announced:
            work.journal.released(announced.pop())
        announced.append(f"uid:{uid}")
        work.journal.acquire(resources.UID, announced[0], uid=uid)

    return uids.allocate(work.layout, str(work.lease.generation), announce)


def _create(work: Boot, spec: DomainSpec, uid: int) -> None:
    """Have libvirt start QEMU.

    QEMU waits for the daemons of its shares, and libvirt for QEMU: a daemon
    that its user has stopped must not look like a libvirt that hangs.
    """
    helpers = work.helpers[spec.guest.index]
    timeout_s = deadlines.start_s(work.layout.config.guests, spec.guest)

    def watch() -> None:
        if error := helpers.disturbed():
            raise error

    try:
        work.hypervisor.create(render(spec), timeout_s, watch)
    except UserError:
        for ref in process.of_uid(uid):
            process.end(ref)  # libvirt waits for it
        raise
    except DomainRefusedError as err:
        # with QEMU its daemons have ended
        raise helpers.disturbed() or refusal.judge(work.hypervisor, spec, work.inventory, err) from err
    except NodeError as err:
        raise helpers.disturbed() or helpers.ended() or err from err


def _spec(work: Boot, guest: GuestPlan, uid: int, boot_files: tuple[Path, Path]) -> DomainSpec:
    config, run_dir = work.layout.config.guests, work.run_dir(guest)
    helpers = work.helpers[guest.index]
    assert work.staged is not None
    kernel, initrd = boot_files
    libvirt_version, _ = work.hypervisor.version()
    return DomainSpec(
        name=domain_name(work.lease.generation, guest.index),
        generation=work.lease.generation,
        guest=guest,
        hypervisor="kvm" if work.inventory.kvm else "qemu",
        cpu_vendor=work.inventory.cpu_vendor,
        invariant_tsc=work.inventory.invariant_tsc,
        libvirt_version=libvirt_version,
        emulator=config.emulator,
        kernel=str(kernel),
        initrd=str(initrd),
        root=str(work.staged.root),
        root_format=work.image.manifest.root_format,
        cmdline=work.image.manifest.cmdline,
        uid=uid,
        gid=accounts.group_id(config.qemu_group),
        agent_socket=str(agent_socket(run_dir)),
        console_log=str(run_dir / "console.log"),
        shares=tuple(ShareSpec(s.tag, str(helpers.socket_of(s))) for s in helpers.shares),
        partition=work.cgroup.partition if work.cgroup else "",
    )


def _ended(work: Boot, guest: GuestPlan) -> bool:
    """Whether a guest has ended; libvirt may notice a little later than others."""
    name = domain_name(work.lease.generation, guest.index)
    until = time.monotonic() + 2.0
    while work.hypervisor.running(name):
        if time.monotonic() >= until:
            return False
        time.sleep(0.1)
    return True


def _reach_agent(work: Boot, guest: GuestPlan, since: float) -> GuestChannel:
    """Start the shim and wait for the agent's hello, as long as the guest lives and the deadline allows.

    Each deadline counts from the guest's own start: several guests do not add theirs up.
    """
    run_dir = work.run_dir(guest)
    until = since + _boot_limit(work, guest)
    try:
        work.helpers[guest.index].start_shim(_connect(agent_socket(run_dir)))
    except NodeError as err:
        # a guest that ends at once takes its channel and its folders' daemons with it: not the node's fault
        if work.helpers[guest.index].disturbed() or _ended(work, guest):
            raise _boot_failure(work, guest, late=False) from err
        raise
    try:
        channel = GuestChannel.connect(run_dir / ROOT_SOCKET, max(1.0, until - time.monotonic()))
        _hear(work, guest, channel, until)
    except ChannelError as err:
        raise _boot_failure(work, guest, late=time.monotonic() >= until - 1.0) from err
    return channel


def _hear(work: Boot, guest: GuestPlan, channel: GuestChannel, until: float) -> None:
    """Wait for the agent's hello.

    Raises:
        Stopped: the job has ended meanwhile.
        UserError: the user has stopped a helper.
        ChannelError: the guest has ended, or stays silent.
    """
    while True:
        try:
            channel.hello(max(1.0, min(ASK_S, until - time.monotonic())))
            return
        except ChannelSilentError:
            if time.monotonic() >= until - 1.0:
                raise
        if error := work.helpers[guest.index].disturbed():
            raise error
        if work.over():
            raise Stopped(f"generation {work.lease.generation} was ended")


def _boot_limit(work: Boot, guest: GuestPlan) -> int:
    return deadlines.boot_s(work.layout.config.guests, work.lease.request.timeout_s, guest)


def _boot_failure(work: Boot, guest: GuestPlan, *, late: bool) -> UserError:
    """Why a guest did not come up: silent until the deadline, or dead before it.

    Mostly it is the image's doing.  A crash of QEMU may be the guest's as well,
    so it costs the job and not the node.
    """
    words = console.last_words(work.run_dir(guest) / "console.log")
    said = f"its console ended with: {words}" if words else "it wrote nothing to its console"
    image, node = work.image.ref, work.plan.node
    if error := work.helpers[guest.index].disturbed():
        return UserError(f"{error.what} on {node} while image {image} booted", error.why, error.hint)
    if late:
        return UserError(
            f"image {image} did not get ready within {_boot_limit(work, guest)} s on {node}",
            said,
            "--vhpc-timeout gives it longer",
        )
    crash = qemulog.crash(domain_name(work.lease.generation, guest.index)) if _ended(work, guest) else None
    if crash:
        return UserError(
            f"QEMU crashed on {node} while image {image} booted",
            crash,
            "submit the job again; if it ends like this again, tell the site's support",
        )
    if crash is not None and not words:
        return UserError(
            f"the guest ended on {node} while image {image} booted",
            "QEMU crashed or was killed, or the kernel panicked without a word",
            "submit the job again; if it ends like this again, see to the image",
        )
    return UserError(f"image {image} did not boot on {node}", said)


def _set_up(work: Boot, guest: GuestPlan, channel: GuestChannel) -> None:
    account, timeout = work.account, float(work.layout.config.guests.stage_timeout_s)
    guids = ports.expected(work.lease, work.plan, guest, work.inventory)
    hosts = _hosts(guest.hostname, work.lease.network.addresses if guids else ())
    try:
        channel.identity(
            hostname=guest.hostname,
            hosts=hosts,
            name=account.name,
            uid=account.uid,
            gid=account.gid,
            gecos=account.gecos.replace(":", " ").replace(",", " "),
            home=account.home,
            shell=account.shell,
            groups=account.groups,
            commands=work.layout.config.host.commands,
            timeout_s=timeout,
        )
        for share in work.helpers[guest.index].shares:
            channel.mount(share.tag, share.path, read_only=share.read_only, timeout_s=timeout)
        if guids:
            wait_s = work.layout.config.fabric.guest_timeout_s
            ports.find(work.lease, guest.hostname, guids, channel, wait_s=wait_s, timeout_s=timeout)
        _tell_nccl(work, guest, channel, timeout)
        channel.ready(timeout_s=timeout)
    except ChannelError as err:
        raise UserError(
            f"image {work.image.ref} could not be set up on {work.plan.node}",
            str(err),
            console.last_words(work.run_dir(guest) / "console.log"),
        ) from err


def _tell_nccl(work: Boot, guest: GuestPlan, channel: GuestChannel, timeout: float) -> None:
    """Where the guest does not see how near its devices are, it gets a file that says so."""
    xml = nccl.topology(guest, work.inventory)
    if not xml:
        return
    try:
        channel.topology(xml, timeout)
    except ChannelRefusedError as err:
        # slower, perhaps, and nothing worse: an agent that is older than this, or a guest without room
        log.warning("%s gets no topology for NCCL: %s", guest.hostname, err.why)


def _hosts(hostname: str, addresses: tuple[tuple[str, str], ...]) -> list[str]:
    """Lines of the guest's /etc/hosts; without a network of its own its name still resolves, to itself."""
    lines = [f"{address} {name}" for name, address in addresses]
    return lines if hostname in dict(addresses) else [f"127.0.1.1 {hostname}", *lines]


def _connect(path: Path) -> socket.socket:
    """Connect to the socket that libvirt made for the agent's port."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.connect(str(path))
    except OSError as err:
        sock.close()
        raise NodeError(f"cannot reach the guest's channel {path}", str(err), "see QEMU's log") from err
    return sock
