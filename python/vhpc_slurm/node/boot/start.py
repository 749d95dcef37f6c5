# SPDX-License-Identifier: Apache-2.0
"""Starting guests: the image on the node, the control group, helpers, and QEMU."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

from vhpc_slurm.domain.render import prepare, render
from vhpc_slurm.domain.spec import DomainSpec
from vhpc_slurm.errors import NodeError, UserError
from vhpc_slurm.model import GuestPlan, RunningGuest, Share
from vhpc_slurm.node.boot import peers, resumption
from vhpc_slurm.node.boot.helpers import Helpers
from vhpc_slurm.node.boot.spec import domain_spec
from vhpc_slurm.node.boot.state import Boot, Common, Started
from vhpc_slurm.node.guest import console, refusal, snapshots
from vhpc_slurm.node.guest.libvirtd import DomainRefusedError
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.cgroup import Cgroup
from vhpc_slurm.node.host.limits import limits_of
from vhpc_slurm.node.resource.cgroup import ControlGroup
from vhpc_slurm.node.resource.disk import Disk
from vhpc_slurm.node.resource.domain import Domain
from vhpc_slurm.node.resource.image import Image
from vhpc_slurm.node.resource.nat import Nat
from vhpc_slurm.node.resource.site import Site
from vhpc_slurm.node.resource.uid import Uid
from vhpc_slurm.node.store import disks, images, timeline
from vhpc_slurm.node.store.images import StagedImage

log = logging.getLogger("vhpc")
SLOW_S = 5.0
"""If QEMU starts so slowly, a trial shows whether a limit of the user keeps a daemon from answering it."""
SNAPSHOTS = "snapshots"
SOURCES = "image sources"
"""In the timeline: bytes from the catalogue, of an interrupted copy (kept), and from other nodes."""


def stage_image(work: Boot) -> Generator[None, None, StagedImage]:
    """Pin the image and copy it to the node; yields during a long copy."""
    Image().take(work.layout, work.journal, work.image)
    lineage, began = peers.begin(work), timeline.now()
    staged = yield from images.stage(work.layout, work.image, work.account, lineage)
    if staged.sources:
        said = ", ".join(f"{source} {size}" for source, size in staged.sources)
        work.recorder.note(SOURCES, began, detail=said)
    return staged


def find_snapshots(work: Boot) -> tuple[Share, ...]:
    """The plan's folders; those with a snapshot that these guests can use have it.

    Raises:
        UserError: the guests resume a checkpoint that needs a snapshot which does not exist any more.
    """
    began, resume = timeline.now(), work.lease.resume
    problems: tuple[str, ...] = ()
    if resume is not None:
        found = resumption.find_snapshots(work, resume)
    else:
        found, problems = snapshots.current(work.layout.config, work.plan.shares, work.image)
    for problem in problems:
        log.warning("%s; guests get the folder through virtiofsd", problem)
    said = [f"{share.path} is {Path(share.snapshot).name}" for share in found if share.snapshot]
    if said or problems:
        work.recorder.note(SNAPSHOTS, began, detail="; ".join((*said, *problems)))
    return found


def make_cgroup(work: Boot) -> Cgroup | None:
    """Make the control group of the guests and their helpers, before the first of them exists."""
    if work.layout.config.guests.cgroups == "off":
        return None
    with work.recorder.stage("cgroup"):
        return ControlGroup().take(work.journal, limits_of(work.plan, work.layout.config.guests))


def make_disks(work: Boot) -> None:
    """Make the disks of all guests, before the first of them starts.

    Raises:
        UserError: they are larger than the site allows, or than what is free here.
        NodeError: this node cannot make them.
    """
    guests = work.plan.guests
    disks.check_space(work.layout, sum(guest.disk_mib for guest in guests), work.plan.node)
    for guest in guests:
        Disk().take(
            work.layout,
            work.journal,
            guest.index,
            guest.disk_mib,
            work.plan.node,
            blank=work.lease.resume is not None,
        )


def start_guest(work: Boot, common: Common, guest: GuestPlan, opened: ExitStack) -> Started:
    """Start one guest with its helpers; ``opened`` closes this process's ends of them."""
    layout, paths = work.layout, guest.paths
    run_dir = Path(paths.run_dir)
    run_dir.mkdir(mode=0o711)
    # libvirt makes the agent's socket writable for a whole group: only root may reach it
    Path(paths.agent_socket).parent.mkdir(mode=0o700)
    # also after an error the copies end before the folder is removed
    with ThreadPoolExecutor(1) as meanwhile:
        copies = meanwhile.submit(images.private_copies, common.staged, run_dir)
        uid = Uid().take(layout, work.journal)
        common.memory.add_owner(uid)
        limits = limits_of(work.plan, layout.config.guests)
        helpers = Helpers(layout, work.journal, guest, work.account, uid, common.cgroup, limits)
        opened.enter_context(closing(helpers))
        running = _start_helpers(work, common, guest, uid, helpers)
        libvirt_version, _ = work.hypervisor.version()
        spec = domain_spec(layout.config, work.plan, running, work.host, work.image, libvirt_version)
        boot_files = copies.result()
    _create(work, helpers, spec)
    for path in boot_files:
        path.unlink()  # QEMU has read them
    pids = [ref.pid for ref in process.of_uid(uid)]
    if common.cgroup is not None:
        for pid in pids:
            common.cgroup.add(pid)
    common.memory.add_guest(pids)
    return Started(running, helpers, time.monotonic())


def _start_helpers(work: Boot, common: Common, guest: GuestPlan, uid: int, helpers: Helpers) -> RunningGuest:
    """Start all that the guest needs before its QEMU, and make its files."""
    layout = work.layout
    helpers.start_daemons([share for share in common.shares if not share.snapshot])
    prepare()  # while the daemons start
    served, site = helpers.served(), None
    shares = tuple(share for share in common.shares if share.snapshot or share in served)
    helpers.start_locks(shares)
    if guest.nat is not None:
        Nat().take(layout, work.journal, work.lease, guest, uid)
    if guest.site is not None:
        site = Site().take(layout, work.journal, work.plan.node, guest.index, guest.site)
    if guest.nat is not None:
        helpers.start_passt(guest.nat)
    console.prepare(Path(guest.paths.console_log), work.account.uid)
    if guest.disk_mib:
        disks.give(layout, work.lease.generation, guest.index, uid)
    return RunningGuest(guest, uid, shares, common.mtu, site)


def _create(work: Boot, helpers: Helpers, spec: DomainSpec) -> None:
    """Have libvirt start QEMU.

    QEMU waits for the daemons of its shares, and libvirt for QEMU: a daemon
    that its user has stopped must not look like a libvirt that hangs.
    """
    asks_at = time.monotonic() + SLOW_S

    def watch() -> None:
        nonlocal asks_at
        if error := helpers.disturbed():
            raise error
        if time.monotonic() >= asks_at:
            asks_at = math.inf
            if error := helpers.exhausted():
                raise error

    def start() -> None:
        if work.lease.resume is not None:
            resumption.start(work, work.lease.resume, spec, watch)
        else:
            work.hypervisor.create(render(spec), spec.guest.start_timeout_s, watch)

    try:
        Domain().take(work.journal, spec.name, spec.running.uid, start)
    except UserError:
        for ref in process.of_uid(spec.running.uid):
            process.end(ref)  # libvirt waits for it
        raise
    except DomainRefusedError as err:
        # with QEMU its daemons have ended
        raise (
            helpers.disturbed()
            or helpers.exhausted()
            or refusal.judge(work.hypervisor, spec, err, own_image=work.image.ref.own)
        ) from err
    except NodeError as err:
        raise helpers.disturbed() or helpers.exhausted() or helpers.ended() or err from err
