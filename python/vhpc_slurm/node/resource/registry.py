# SPDX-License-Identifier: Apache-2.0
"""All kinds of resources, and what is done with all of them.

Every release is idempotent, also for a resource that was announced and never
taken, and verifies: it returns only when the resource is free, else it raises.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from vhpc_slurm.config import Config
from vhpc_slurm.errors import TeardownError, VhpcError
from vhpc_slurm.node.checked import CheckResult
from vhpc_slurm.node.devices.quarantine import QuarantinedError
from vhpc_slurm.node.finding import NodeFinding
from vhpc_slurm.node.resource.cgroup import ControlGroup
from vhpc_slurm.node.resource.device import AssignedDevice
from vhpc_slurm.node.resource.disk import Disk
from vhpc_slurm.node.resource.domain import Domain
from vhpc_slurm.node.resource.image import Image
from vhpc_slurm.node.resource.job_network import JobNetwork
from vhpc_slurm.node.resource.memory import Memory
from vhpc_slurm.node.resource.nat import Nat
from vhpc_slurm.node.resource.network import GuestNetwork
from vhpc_slurm.node.resource.nvswitch import NvSwitch
from vhpc_slurm.node.resource.process import Process
from vhpc_slurm.node.resource.protocol import Resource, Result
from vhpc_slurm.node.resource.reservations import Reservations
from vhpc_slurm.node.resource.run_folder import RunFolder
from vhpc_slurm.node.resource.site import Site
from vhpc_slurm.node.resource.uid import Uid
from vhpc_slurm.node.store.journal import OTHER_VERSION, Entry, Journal
from vhpc_slurm.node.store.layout import Layout

NETWORKS: tuple[GuestNetwork, ...] = (JobNetwork(), Nat(), Site())
"""In the order in which a guest gets them."""
RESOURCES: tuple[Resource, ...] = (
    Domain(),
    Process(),
    Uid(),
    ControlGroup(),
    RunFolder(),
    Image(),
    Disk(),
    AssignedDevice(),
    *NETWORKS,
    Memory(),
    NvSwitch(),
    Reservations(),
)
"""In the order in which orphans are looked for: what runs comes first.  Releases follow the journal."""
_BY_KIND = {resource.kind: resource for resource in RESOURCES}


def release_all(layout: Layout, journal: Journal, keep: tuple[str, ...] = ()) -> list[VhpcError]:
    """Release everything a generation holds but the kinds in ``keep``, newest first; failures do not stop it.

    Devices, which take long, are released side by side.

    Returns what could not be released; those entries stay in the journal.
    """
    failures: list[VhpcError] = []
    for entry, err in _release_each(layout, journal, keep):
        if err is not None:
            failures.append(
                err
                if isinstance(err, VhpcError)
                else TeardownError(f"cannot release {entry.kind} {entry.key}", str(err))
            )
        if err is None or isinstance(err, QuarantinedError):
            journal.released(entry.key)  # a quarantined device no longer belongs to the job
    return failures


def _release_each(layout: Layout, journal: Journal, keep: tuple[str, ...]) -> Iterator[Result]:
    """Release one after another, those of one kind that were taken together together; yields the results."""
    held = (entry for entry in journal.held() if entry.kind not in keep)
    for kind, group in itertools.groupby(held, lambda entry: entry.kind):
        entries = list(group)
        if kind in _BY_KIND:
            yield from _BY_KIND[kind].release_each(layout, journal.generation, entries)
        else:
            yield from ((entry, _unknown(entry)) for entry in entries)


def _unknown(entry: Entry) -> TeardownError:
    return TeardownError(
        f"the journal has a resource of the kind {entry.kind!r}, which this version does not know",
        "a newer vhpc has written it",
        OTHER_VERSION,
    )


def orphans(layout: Layout) -> Iterator[NodeFinding]:
    """Resources on this node that no journal has, of all kinds."""
    for resource in RESOURCES:
        yield from resource.orphans(layout)


def check(config: Config, node: str, *, root: bool) -> Iterator[CheckResult]:
    """Results of `vhpc doctor` for all kinds on this node."""
    for resource in RESOURCES:
        yield from resource.check(config, node, root=root)
