# SPDX-License-Identifier: Apache-2.0
"""The table [controller] of vhpc.toml: vhpcd, and how it and its clients ask Slurm."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from vhpc_slurm.config.setting import documented


class Controller(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """vhpcd, the controller service."""

    host: Annotated[str, documented("host name or address at which nodes reach vhpcd")] = "localhost"
    backup_hosts: Annotated[
        tuple[str, ...],
        documented(
            "further hosts with a vhpcd, such as those of slurmctld's backups. One vhpcd is active, the "
            'others are standbys; they share a database (database.engine = "mariadb"). Nodes ask host first, '
            "then these, in this order; a host with a vhpcd asks itself first"
        ),
    ] = ()
    listen: Annotated[str, documented("address that vhpcd listens on")] = "0.0.0.0"  # noqa: S104 - nodes must reach it; munge authenticates the clients
    port: Annotated[int, documented("TCP port of vhpcd", ge=1, le=65535)] = 7633
    user: Annotated[str, documented("user that vhpcd runs as; clients accept answers only from it")] = "vhpc"
    slurm_user: Annotated[
        str, documented("SlurmUser of slurm.conf: vhpcd accepts requests only from it and root")
    ] = "slurm"
    web_user: Annotated[
        str,
        documented(
            "user of the unit vhpc-web.service; it may ask vhpcd what another user may see. Empty: none, "
            "beside root and SlurmUser"
        ),
    ] = ""
    database: Annotated[str, documented("SQLite file of the leases")] = "/var/lib/vhpc/vhpcd/leases.sqlite"
    munge_socket: Annotated[str, documented("munged's socket; empty means munge's own default")] = ""
    request_timeout_s: Annotated[
        int,
        documented(
            "longest wait for an answer of vhpcd; a job's key must be on the fabric a second earlier",
            ge=1,
            le=600,
        ),
    ] = 10
    lease_wait_s: Annotated[
        int, documented("longest wait of a node for a lease to become READY", ge=1, le=600)
    ] = 60
    slurm_bin: Annotated[
        str,
        documented(
            "folder of Slurm's commands on every host, which programs in guests run there too; absolute path",
            pattern=r"^/[^:\x00-\x1f]*$",
        ),
    ] = "/usr/bin"
    slurm_conf: Annotated[
        str, documented("slurm.conf for these commands; empty means Slurm's own default")
    ] = ""
    node_names: Annotated[
        tuple[str, ...],
        documented(
            'additional names of nodes, such as "{node}-ib" with {node} for Slurm\'s name. vhpcd accepts '
            "reports about a node only from the addresses of its NodeAddr and NodeHostName, which it reads "
            "from Slurm, and of these names"
        ),
    ] = ()
    node_addresses: Annotated[
        tuple[str, ...], documented("additional addresses of single nodes: NODE=ADDRESS or NODE=NAME")
    ] = ()
    controller_addresses: Annotated[
        tuple[str, ...],
        documented(
            "additional addresses or names of hosts with slurmctld's hooks and vhpc fabric; vhpcd's "
            "own host and those of SlurmctldHost are always accepted"
        ),
    ] = ()
    slurm_adapter: Annotated[
        Literal["scontrol", "pyslurm", "auto"],
        documented(
            "how vhpcd asks Slurm for jobs. scontrol: by Slurm's commands; pyslurm: by pyslurm, "
            "which must be of Slurm's release, 25.05 or newer; auto: by pyslurm where its answers pass "
            "vhpcd's checks, else by the commands. vhpc doctor says which is used and why"
        ),
    ] = "scontrol"
    reconcile_interval_s: Annotated[
        float, documented("how often vhpcd asks Slurm for its jobs, by one squeue", ge=0.1, le=3600)
    ] = 60.0
    prolog_stuck_s: Annotated[
        int,
        documented(
            "a job with guests is requeued after so many seconds in Reason=Prolog (sooner if vhpcd knows "
            "that all its Prologs have ended); 0: never. Keep it above PrologEpilogTimeout and "
            "BatchStartTimeout",
            ge=0,
        ),
    ] = 1200
    metrics: Annotated[
        str,
        documented(
            "where Prometheus reads vhpcd's metrics over HTTP, without authentication: ADDRESS:PORT, like "
            '"127.0.0.1:9633", or the path of a Unix socket; empty: nowhere',
            pattern=r"^(|/[^\x00]+|[^/\s]+:[0-9]{1,5})$",
        ),
    ] = ""
    history_days: Annotated[
        int, documented("how long leases, timelines and reports of ended jobs are kept", ge=1)
    ] = 30

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts with a vhpcd, each once, in the order in which clients ask them."""
        return tuple(dict.fromkeys((self.host, *self.backup_hosts)))
