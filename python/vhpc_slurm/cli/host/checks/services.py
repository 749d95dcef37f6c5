# SPDX-License-Identifier: Apache-2.0
"""Services that every host uses: munge and vhpcd."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vhpc_slurm import __version__
from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.controller.leases.ssh_keys import PROGRAM as SSH_KEYGEN
from vhpc_slurm.controller.leases.ssh_keys import SEARCH
from vhpc_slurm.controller.leases.tunnel_keys import make as make_tunnel_keys
from vhpc_slurm.errors import VhpcError
from vhpc_slurm.munge import Munge
from vhpc_slurm.slurm import sbcast_of_users

if TYPE_CHECKING:
    from vhpc_slurm.controller.api.status_messages import AlarmWire, FabricState, Status

SKEW_S = 30
"""With a larger difference of clocks munge soon rejects credentials (they are valid for 300 s)."""


def munge(config: Config) -> CheckResult:
    """Encode and decode a credential: munged runs and has a key."""
    service = Munge(config.controller.munge_socket)
    sent = os.urandom(16)
    try:
        read = service.decode(service.encode(sent, ttl_s=30))
    except VhpcError as err:
        return error("munge", err.line(), "start munged, with the key of the cluster")
    if read.payload != sent or read.uid != os.geteuid():
        return error("munge", "munge decoded another credential than it had encoded", "restart munged")
    return ok("munge", "a credential was encoded and decoded")


def ssh_keygen(config: Config) -> Iterator[CheckResult]:
    """Whether vhpcd's host can make keys for ssh between the guests of a job with a network."""
    if "job" not in config.network.allowed:
        return
    program = shutil.which(SSH_KEYGEN, path=SEARCH)
    if program is None:
        yield warn(
            "network.ssh",
            f"this host has no {SSH_KEYGEN}: guests of a job cannot log in to each other by ssh",
            "apt install openssh-client",
        )
    else:
        yield ok("network.ssh", f"{program} makes the keys for ssh between guests")


def tunnel_keys(config: Config) -> Iterator[CheckResult]:
    """Whether vhpcd's host can make keys for encrypted job networks."""
    if "job" not in config.network.allowed or config.network.encryption == "none":
        return
    try:
        make_tunnel_keys(1)
    except VhpcError as err:
        yield error("network.keys", f"jobs with --vhpc-network=job do not start: {err.line()}", err.hint)
    else:
        yield ok("network.keys", "this host can make keys for encrypted job networks")


def sbcast(config: Config) -> Iterator[CheckResult]:
    """Whether users run vhpc-sbcast, which knows guests; no result on hosts without sbcast."""
    found = sbcast_of_users(config)
    if found is None:
        return
    ours = f"{config.paths.libexec}/vhpc-sbcast"
    if Path(found).resolve() == Path(ours).resolve():
        yield ok("slurm.sbcast", f"{found} is vhpc-sbcast")
        return
    yield warn(
        "slurm.sbcast",
        f"{found} is Slurm's own: run outside of the guests for a job with guests, it reports success, but "
        "puts the file on the nodes, where programs in guests do not see it",
        f"ln -s {ours} /usr/local/bin/sbcast",
    )


def vhpcd(
    config: Config, *, listener: bool, node: str = "", controller: bool = False
) -> Iterator[CheckResult]:
    """Whether vhpcd answers, has this version and this time, and accepts requests from this host.

    Args:
        config: the configuration, with the address of vhpcd.
        listener: whether vhpcd accepts requests of this user.
        node: Slurm's name of this host; empty when it is not a node.
        controller: whether slurmctld may run here.
    """
    where = f"{' or '.join(config.controller.hosts)}:{config.controller.port}"
    if not listener:
        yield warn("vhpcd", f"vhpcd at {where} was not checked", "run vhpc doctor as root")
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
            "install the same version everywhere",
        )
    skew = status.time - now
    if abs(skew) > SKEW_S:
        yield error(
            "clock",
            f"the clock of vhpcd's host differs by {skew:+.0f} s",
            "synchronize the clocks, for example with chrony",
        )
    else:
        yield ok("clock", f"vhpcd's clock differs by {skew:+.1f} s")
    yield from _standbys(config)
    yield from _believed(status, node, controller=controller)
    yield from _isolation(status.fabric, status.time)
    yield from _alarms(status.alarms, status.time)


def _standbys(config: Config) -> Iterator[CheckResult]:
    """With several vhpcd: whether each of them runs, one of them as the active one."""
    from vhpc_slurm.controller.client import ControllerClient
    from vhpc_slurm.controller.exchange import NotActiveError

    hosts = config.controller.hosts
    if len(hosts) < 2:
        return
    active, standbys = [], []
    for host in hosts:
        try:
            ControllerClient(config, host=host).status()
            active.append(host)
        except NotActiveError:
            standbys.append(host)
        except VhpcError as err:
            yield error("vhpcd.standby", f"{host} cannot take over: {err.line()}", f"start vhpcd on {host}")
    if active and standbys:
        yield ok("vhpcd.standby", f"vhpcd on {active[0]} is active, standbys: {', '.join(standbys)}")


def _believed(status: Status, node: str, *, controller: bool) -> Iterator[CheckResult]:
    from vhpc_slurm.controller.api.protocol import ANY, CONTROLLER

    if status.speaks_for == (ANY,):
        return
    if node and node not in status.speaks_for:
        yield error(
            "address",
            f"vhpcd sees this host at {status.seen_at}, which is not an address of node {node} in Slurm, so "
            "it rejects requests for leases and acknowledgements from here",
            "add it to controller.node_names or node_addresses of vhpcd's vhpc.toml, restart vhpcd",
        )
    elif node:
        yield ok("address", f"vhpcd knows {status.seen_at} as an address of node {node}")
    if controller and CONTROLLER not in status.speaks_for:
        yield error(
            "address",
            f"vhpcd sees this host at {status.seen_at}, which is not an address of slurmctld's hosts, so it "
            "rejects new jobs from here",
            "add the address to controller.controller_addresses in vhpcd's vhpc.toml, and restart vhpcd",
        )


def _isolation(fabric: FabricState, now: float) -> Iterator[CheckResult]:
    """State of the fabric from vhpcd's auditor; no result when it is correct."""
    audit = "run on vhpcd's host: vhpc fabric audit, and vhpc doctor"
    if not fabric.safe:
        open_s = now - (fabric.open_since or now)
        yield error(
            "fabric.open",
            f"for {open_s:.0f} s the fabric has been open or unreadable, so jobs with a key do not start, "
            f"and nodes end guests with a key: {fabric.what}",
            audit,
        )
    for generation, what in fabric.lost:
        yield error(
            "fabric.lost-key",
            f"generation {generation} has lost its key, and nodes end its guests: {what}",
            audit,
        )
    if fabric.safe and fabric.what:
        yield warn("fabric.open", f"the fabric differs from the keys in use: {fabric.what}", audit)


def _alarms(alarms: Sequence[AlarmWire], now: float) -> Iterator[CheckResult]:
    """Guests that nodes could not start, or were not permitted to start, one result for each cause."""
    for what in dict.fromkeys(alarm.what for alarm in alarms):
        same = [alarm for alarm in alarms if alarm.what == what]
        jobs, nodes = {alarm.job_id for alarm in same}, sorted({alarm.node for alarm in same})
        yield warn(
            "alarms",
            f"guests of {len(jobs)} jobs were refused on {', '.join(nodes)}, last of job "
            f"{same[-1].job_id} {(now - same[-1].time) / 3600:.1f} h ago: {what}",
            "see hooks.log and vhpc plan on the node; this result disappears a week after the last refusal",
        )
