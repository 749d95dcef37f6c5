# SPDX-License-Identifier: Apache-2.0
"""Releasing what a journal says is held: one release for each kind of resource.

Every release is idempotent, also for a resource that was announced and never
taken, and verifies: it returns only when the resource is free, else it raises.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from vhpc_slurm.errors import NodeError, TeardownError, VhpcError
from vhpc_slurm.model import Generation
from vhpc_slurm.node.devices import assignment, nvswitch
from vhpc_slurm.node.devices.quarantine import QuarantinedError
from vhpc_slurm.node.guest import libvirtd, memory
from vhpc_slurm.node.host import process
from vhpc_slurm.node.host.cgroup import Cgroup
from vhpc_slurm.node.network import nat, segment, site
from vhpc_slurm.node.store import disks, kinds, pins, uids
from vhpc_slurm.node.store.journal import Entry, Journal
from vhpc_slurm.node.store.layout import Layout

log = logging.getLogger("vhpc")
_OTHER_VERSION = "install the version that wrote it again, then run: vhpc reconcile"


def release_all(layout: Layout, journal: Journal, keep: tuple[str, ...] = ()) -> list[VhpcError]:
    """Release everything a generation holds but the kinds in ``keep``, newest first; go on past failures.

    Devices, which take long, are released side by side.

    Returns what could not be released; those entries stay in the journal.
    """
    failures: list[VhpcError] = []
    for entry, err in _release_each(layout, str(journal.generation), journal.held(), keep):
        if err is not None:
            failures.append(
                err
                if isinstance(err, VhpcError)
                else TeardownError(f"cannot release {entry.kind} {entry.key}", str(err))
            )
        if err is None or isinstance(err, QuarantinedError):
            journal.released(entry.key)  # a quarantined device no longer belongs to the job
    return failures


def _release_each(
    layout: Layout, generation: str, held: list[Entry], keep: tuple[str, ...]
) -> Iterator[tuple[Entry, Exception | None]]:
    """Release one after another, devices that were taken together together; yields what came of each."""
    for kind, entries in itertools.groupby((e for e in held if e.kind not in keep), lambda e: e.kind):
        if kind == kinds.DEVICE:
            yield from assignment.release_together(layout, generation, list(entries))
            continue
        for entry in entries:
            try:
                _release(kind)(layout, generation, entry)
            except (VhpcError, OSError) as err:
                yield entry, err
            except (KeyError, ValueError, TypeError) as err:
                why = f"its entry in the journal cannot be used: {err!r}"
                yield entry, TeardownError(f"cannot release {entry.kind} {entry.key}", why, _OTHER_VERSION)
            else:
                yield entry, None


def _release(kind: str) -> Callable[[Layout, str, Entry], None]:
    """How resources of this kind are released; TeardownError if this version does not know the kind."""
    if kind not in _RELEASES:
        raise TeardownError(
            f"the journal has a resource of the kind {kind!r}, which this version does not know",
            "a newer vhpc has written it",
            _OTHER_VERSION,
        )
    return _RELEASES[kind]


def _release_run_dir(_layout: Layout, _generation: str, entry: Entry) -> None:
    path = Path(entry.data["path"])
    # rmtree works on descriptors here (shutil.rmtree.avoids_symlink_attacks);
    # the folder is root's own anyway.
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _release_reservation(_layout: Layout, _generation: str, _entry: Entry) -> None:
    """CPUs, memory and devices were only planned: removing the entry from the journal frees them."""


def _release_image(layout: Layout, generation: str, entry: Entry) -> None:
    pins.unpin(layout, entry.data["digest"], generation)


def _release_uid(layout: Layout, generation: str, entry: Entry) -> None:
    uids.release(layout, int(entry.data["uid"]), generation)


def _release_process(_layout: Layout, generation: str, entry: Entry) -> None:
    """End a helper process; one whose pid was never noted is found by its marker and program."""
    if "pid" in entry.data:
        process.end(process.ProcessRef(int(entry.data["pid"]), int(entry.data["started"])), grace_s=0.5)
        return
    for ref, _ in process.marked(generation):
        process.end(ref)


def _release_domain(layout: Layout, generation: str, entry: Entry) -> None:
    """End a guest through libvirt, and by its uid where libvirt cannot.

    libvirtd may be down exactly when a node is being cleaned.  Its QEMU has a
    uid of its own, so it can be ended all the same; libvirt notices when it is
    back.  After a reboot the uid may be another guest's: allocations do not outlive
    the processes that they are for, journals do.
    """
    config = layout.config.guests
    uid = int(entry.data["uid"])
    try:
        with libvirtd.connect(config.libvirt_uri, config.stage_timeout_s) as hypervisor:
            hypervisor.destroy(entry.data["name"])
    except NodeError:
        if not uids.in_range(layout.config, uid):
            raise
    if uids.held(layout, uid, generation):
        for ref in process.of_uid(uid):
            process.end(ref)


def _release_cgroup(_layout: Layout, generation: str, _entry: Entry) -> None:
    """End all processes in the control group, and remove the group."""
    group = Cgroup.of(generation)
    group.kill()
    group.remove()


def _release_memory(layout: Layout, generation: str, entry: Entry) -> None:
    """Verify that no process holds memory of the guests, after QEMU and the share daemons have ended."""
    inodes = [(int(device), int(inode)) for device, inode in entry.data.get("inodes", ())]
    owners = [int(uid) for uid in entry.data["owners"]]
    group = None if layout.config.guests.cgroups == "off" else Cgroup.of(generation)
    for holder in memory.release(inodes, group, owners):
        log.warning("ended %s: it held memory of a guest of generation %s", holder, generation)


def _release_disk(layout: Layout, generation: str, entry: Entry) -> None:
    """Delete a guest's disk; QEMU has ended."""
    disks.delete(layout, Generation.parse(generation), int(entry.data["index"]))


def _release_nvswitch(layout: Layout, _generation: str, entry: Entry) -> None:
    nvswitch.release(nvswitch.Fmpm(layout.config.devices), entry)


def _release_network(_layout: Layout, generation: str, entry: Entry) -> None:
    """Remove the devices and the firewall of the job's segment; its guests have ended."""
    segment.release(Generation.parse(generation), int(entry.data["vni"]))


def _release_nat(_layout: Layout, generation: str, entry: Entry) -> None:
    """Remove the packet filter of a guest's passt, which has ended."""
    nat.release(Generation.parse(generation), int(entry.data["index"]))


def _release_site(_layout: Layout, generation: str, entry: Entry) -> None:
    """Remove a guest's tap from the bridge of the site, and its packet filter; the guest has ended."""
    site.release(Generation.parse(generation), int(entry.data["index"]), entry.data["tap"])


_RELEASES: dict[str, Callable[[Layout, str, Entry], None]] = {
    kinds.RUN_DIR: _release_run_dir,
    kinds.RESERVATION: _release_reservation,
    kinds.IMAGE: _release_image,
    kinds.UID: _release_uid,
    kinds.PROCESS: _release_process,
    kinds.DOMAIN: _release_domain,
    kinds.CGROUP: _release_cgroup,
    kinds.MEMORY: _release_memory,
    kinds.DISK: _release_disk,
    kinds.NVSWITCH: _release_nvswitch,
    kinds.NETWORK: _release_network,
    kinds.NAT: _release_nat,
    kinds.SITE: _release_site,
}
