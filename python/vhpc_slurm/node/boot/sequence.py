# SPDX-License-Identifier: Apache-2.0
"""The order of a boot: from a reserved plan to guests that are ready for tasks.

Each stage announces in the journal what it takes, takes it, and is timed.  A
failure leaves everything to the journal's releases; nothing is undone here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import replace

from vhpc_slurm.model import RunningNode
from vhpc_slurm.node.boot import agent, diagnose, permission, reserve, resumption, start
from vhpc_slurm.node.boot.state import Boot, Common, Started
from vhpc_slurm.node.devices import nvswitch
from vhpc_slurm.node.guest import refusal
from vhpc_slurm.node.resource.job_network import JobNetwork
from vhpc_slurm.node.resource.memory import Memory


def boot(work: Boot) -> Generator[None, None, RunningNode]:
    """Bring all guests of a node's plan up, ready for tasks; a generator that returns them.

    Yields every few seconds of a long wait (a copy of the image, the boot of a
    guest), so that the caller can see whether the job still exists: what it
    throws in there ends the boot.

    Raises:
        UserError: the image will not boot, or is broken, or is refused by the policy here, or libvirt refuses
            a guest of this job.
        NodeError: this node cannot do it.
        FabricError: what the job was given is still in use, or the policy here cannot be checked.
        QuarantinedError: a device got stuck; it is in quarantine.
        Stopped: the journal was closed for this job, which has ended.
    """
    refusal.check_vcpus(work.hypervisor, work.plan.guests, work.host, work.layout.config.guests.emulator)
    nvswitch.check(work.layout.config.devices, work.plan, work.image)
    if (resume := work.lease.resume) is not None:
        resumption.check(work, resume)
    work = replace(work, image=(yield from permission.check(work)))
    with work.recorder.stage("image", work.image.digest):
        staged = yield from start.stage_image(work)
    cgroup = start.make_cgroup(work)
    memory = Memory().take(work.journal, work.account.uid)
    if devices := [device.key for guest in work.plan.guests for device in guest.devices]:
        with work.recorder.stage("devices", " ".join(devices)):
            work = replace(work, plan=reserve.take_devices(work))
    mtu = 0
    if work.plan.segment is not None:
        with work.recorder.stage("network", f"VNI {work.plan.segment.vni}"):
            mtu = JobNetwork().take(work.layout, work.journal, work.lease, work.plan)
    if any(guest.disk_mib for guest in work.plan.guests):
        first = work.plan.guests[0]
        place = f", mounted at {first.disk_mount}" if first.disk_mount else ""
        with work.recorder.stage("disks", f"{len(work.plan.guests)} of {first.disk_mib} MiB{place}"):
            start.make_disks(work)
            if resume is not None:
                yield from resumption.copy_disks(work, resume)
    common = Common(staged, start.find_snapshots(work), cgroup, memory, mtu)
    with contextlib.ExitStack() as opened:
        started: list[Started] = []
        notes: list[str] = []
        for guest in work.plan.guests:
            stage = work.recorder.stage(f"start g{guest.index}", guest.emulator_choice)
            with stage, diagnose.placed(work, guest):
                started.append(start.start_guest(work, common, guest, opened))
        for one in started:
            guest = one.guest.plan
            with work.recorder.stage(f"agent g{guest.index}"), diagnose.placed(work, guest):
                channel = yield from agent.reach(work, one)
            with channel, work.recorder.stage(f"setup g{guest.index}"):
                notes += agent.set_up(work, one, channel)
        resumption.keep_facts(work, started)
    return RunningNode(work.plan, tuple(one.guest for one in started), tuple(dict.fromkeys(notes)))
