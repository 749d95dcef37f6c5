# SPDX-License-Identifier: Apache-2.0
"""Checks of a plan by this node's hardware and programs, for `vhpc plan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vhpc_slurm.cli.host import qemu
from vhpc_slurm.config import Config
from vhpc_slurm.errors import UserError, VhpcError
from vhpc_slurm.model import NodePlan
from vhpc_slurm.node.devices import direct, nvswitch
from vhpc_slurm.placement.input import PlanInput
from vhpc_slurm.placement.plan import Refusal


def checked(config: Config, case: PlanInput, found: NodePlan) -> NodePlan | Refusal:
    """The plan with further notes, or a refusal."""
    try:
        nvswitch.check(config.devices, found, case.image)
    except VhpcError as err:
        return Refusal((err,))
    within = _within_qemus_limit(config, case, found)
    if isinstance(within, Refusal):
        return within
    notes = (*within.notes, *near(case, found, direct.reader(config.host.sysfs_root)))
    return replace(within, notes=(*notes, *large(config, case, found)))


def near(case: PlanInput, found: NodePlan, read: direct.Reader) -> Iterator[str]:
    """A note for each GPU and adapter of a guest below one switch whose data take a detour."""
    functions = {one.address: one for one in case.host.pci}
    for guest in found.guests:
        there = [(one.traits, functions[one.function]) for one in guest.devices if one.function in functions]
        gpus = [place for traits, place in there if traits.slow_boot]
        # the controls of a virtual function are those of its physical one
        physical = [functions.get(place.physfn, place) for traits, place in there if traits.networked]
        for pair in direct.pairs(gpus, [*dict.fromkeys(physical)]):
            for one in direct.detours(pair, read):
                yield (
                    f"data between GPU {pair.gpu} and adapter {pair.adapter} of guest {guest.index} pass "
                    f"through the CPU: {one.why} ({one.hint})"
                )


def large(config: Config, case: PlanInput, found: NodePlan) -> Iterator[str]:
    """A note about large BARs that this node's QEMU maps slowly."""
    slow = {one.function for guest in found.guests for one in guest.devices if one.traits.slow_boot}
    places = [one for one in case.host.pci if one.address in slow]
    if direct.slow_bars(places, direct.FAST_QEMU - 1):
        names = direct.slow_bars(places, qemu.version(config))
        if names:
            yield f"QEMU before 10.1 maps the large BARs of {', '.join(names)} slowly: boots can take minutes"


def _within_qemus_limit(config: Config, case: PlanInput, found: NodePlan) -> NodePlan | Refusal:
    """The plan, or a refusal if QEMU does not support so many vCPUs; libvirt is asked for large guests."""
    from vhpc_slurm.domain import iommu
    from vhpc_slurm.node.guest import libvirtd, refusal

    if all(len(one.pins) <= iommu.ALL_CPUS for one in found.guests):
        return found
    try:
        with libvirtd.connect(config.guests.libvirt_uri, config.guests.stage_timeout_s) as hypervisor:
            refusal.check_vcpus(hypervisor, found.guests, case.host, config.guests.emulator)
    except UserError as err:
        return Refusal((err,))
    except VhpcError as err:
        note = f"QEMU's maximum number of vCPUs was not checked: {err.line()}"
        return replace(found, notes=(*found.notes, note))
    return found
