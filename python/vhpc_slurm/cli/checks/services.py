# SPDX-License-Identifier: Apache-2.0
"""What every host talks to: munge, vhpcd, the image catalogue."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vhpc_slurm import __version__
from vhpc_slurm.catalog import list_images
from vhpc_slurm.cli.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.munge import Munge
from vhpc_slurm.slurm import sbcast_of_users

if TYPE_CHECKING:
    from vhpc_slurm.controller.protocol import AlarmWire, FabricState, Status

SKEW_S = 30
"""Clocks further apart than this soon make munge refuse credentials (they live 300 s)."""


def munge(config: Config) -> CheckResult:
    """A credential made here and read here: munged runs and has a key."""
    service = Munge(config.controller.munge_socket)
    sent = os.urandom(16)
    try:
        read = service.decode(service.encode(sent, ttl_s=30))
    except VhpcError as err:
        return error("munge", err.line(), "start munged; its key must be the cluster's")
    if read.payload != sent or read.uid != os.geteuid():
        return error("munge", "munge returned another credential than was made", "restart munged")
    return ok("munge", "a credential was made and read")


def sbcast(config: Config) -> Iterator[CheckResult]:
    """Whether the sbcast that users call knows of guests; nothing on hosts without Slurm's."""
    found = sbcast_of_users(config)
    if found is None:
        return
    ours = f"{config.paths.libexec}/vhpc-sbcast"
    if Path(found).resolve() == Path(ours).resolve():
        yield ok("slurm.sbcast", f"{found} is vhpc-sbcast")
        return
    yield warn(
        "slurm.sbcast",
        f"{found} is Slurm's own: for jobs with guests, outside of these, it says nothing and its file is "
        "on the nodes, where their programs do not see it",
        f"ln -s {ours} /usr/local/bin/sbcast",
    )


def vhpcd(
    config: Config, *, listener: bool, node: str = "", controller: bool = False
) -> Iterator[CheckResult]:
    """Whether vhpcd answers, is of this version, tells the same time, and believes what this host says.

    Args:
        config: names vhpcd.
        listener: whether vhpcd listens to this user.
        node: Slurm's name of this host; empty where it is no node.
        controller: whether slurmctld may run here.
    """
    where = f"{config.controller.host}:{config.controller.port}"
    if not listener:
        yield warn("vhpcd", f"vhpcd at {where} was not asked", "run vhpc doctor as root")
        return
    from vhpc_slurm.controller.client import ControllerClient

    began = time.time()
    try:
        status = ControllerClient(config).status()
    except VhpcError as err:
        yield error("vhpcd", err.line(), f"start vhpcd, or correct [controller] of vhpc.toml ({where})")
        return
    now = (began + time.time()) / 2
    if status.version == __version__:
        yield ok("vhpcd", f"vhpcd {status.version} at {where}, database {status.database}")
    else:
        yield warn(
            "vhpcd",
            f"vhpcd at {where} has version {status.version}, this host {__version__}",
            "install one version everywhere",
        )
    skew = status.time - now
    if abs(skew) > SKEW_S:
        yield error(
            "clock", f"the clock of vhpcd's host differs by {skew:+.0f} s", "synchronise clocks (chrony)"
        )
    else:
        yield ok("clock", f"vhpcd's clock differs by {skew:+.1f} s")
    yield from _believed(status, node, controller=controller)
    yield from _isolation(status.fabric, status.time)
    yield from _alarms(status.alarms, status.time)


def _believed(status: Status, node: str, *, controller: bool) -> Iterator[CheckResult]:
    from vhpc_slurm.controller.protocol import ANY, CONTROLLER

    if status.speaks_for == (ANY,):
        return
    if node and node not in status.speaks_for:
        yield error(
            "address",
            f"vhpcd sees this host at {status.seen_at}, which Slurm does not have as an address of node "
            f"{node}, so it takes no lease and no acknowledgement from here",
            "name the address in controller.node_names or node_addresses of vhpcd's vhpc.toml, restart vhpcd",
        )
    elif node:
        yield ok("address", f"vhpcd knows {status.seen_at} as an address of node {node}")
    if controller and CONTROLLER not in status.speaks_for:
        yield error(
            "address",
            f"vhpcd sees this host at {status.seen_at}, which is no host of slurmctld for all that it knows, "
            "so it takes no job from here",
            "name the address in controller.controller_addresses of vhpcd's vhpc.toml, and restart vhpcd",
        )


def _isolation(fabric: FabricState, now: float) -> Iterator[CheckResult]:
    """What vhpcd's auditor says of the fabric; nothing where it is as it should be."""
    audit = "on vhpcd's host: vhpc fabric audit, and see the other findings of vhpc doctor there"
    if not fabric.safe:
        open_s = now - (fabric.open_since or now)
        yield error(
            "fabric.open",
            f"for {open_s:.0f} s the fabric has been open or unreadable, so no job with a key starts, "
            f"and nodes end the guests that have one: {fabric.what}",
            audit,
        )
    for generation, what in fabric.lost:
        yield error(
            "fabric.lost-key", f"{generation} has lost its key, and nodes end its guests: {what}", audit
        )
    if fabric.safe and fabric.what:
        yield warn("fabric.open", f"the fabric is not as vhpcd wants it: {fabric.what}", audit)


def _alarms(alarms: Sequence[AlarmWire], now: float) -> Iterator[CheckResult]:
    """What nodes reported of jobs that failed through nobody's mistake, one finding for each cause."""
    for what in dict.fromkeys(alarm.what for alarm in alarms):
        same = [alarm for alarm in alarms if alarm.what == what]
        jobs, nodes = {alarm.job_id for alarm in same}, sorted({alarm.node for alarm in same})
        yield warn(
            "alarms",
            f"libvirt or QEMU refused guests of {len(jobs)} jobs on {', '.join(nodes)}, last of job "
            f"{same[-1].job_id} {(now - same[-1].time) / 3600:.1f} h ago: {what}",
            "see hooks.log of the node, and vhpc plan there; a week after the last one it is forgotten",
        )


def catalogue(config: Config) -> CheckResult:
    """Whether images can be found here."""
    path = Path(config.images.catalog)
    if not path.is_dir():
        return error(
            "catalogue",
            f"{path} does not exist",
            "mount the catalogue, or set images.catalog in vhpc.toml",
        )
    try:
        images = list_images(path)
    except (VhpcError, OSError) as err:
        return error("catalogue", f"{path} cannot be read: {err}", "it must be readable for every node")
    if not images:
        return warn("catalogue", f"{path} holds no image", "publish one: docs/image-format.md")
    broken = [entry for entry in images if entry.identity is None]
    if broken:
        more = f", and {len(broken) - 1} more" if len(broken) > 1 else ""
        return warn("catalogue", f"{broken[0].problem}{more}", "publish it anew, or remove its name")
    return ok("catalogue", f"{path} holds {len(images)} images")
