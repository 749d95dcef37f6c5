# SPDX-License-Identifier: Apache-2.0
"""The table [fabric] of vhpc.toml: every key with its meaning and default."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from vhpc_slurm.config.setting import documented


class Manager(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One OpenSM of a subnet: its three files on vhpcd's host, or a command that runs on its host."""

    partitions: Annotated[str, documented("its partitions file, as fabric.partitions")] = ""
    pidfile: Annotated[str, documented("its pidfile, as fabric.opensm_pidfile")] = ""
    log: Annotated[str, documented("its log, as fabric.opensm_log")] = ""
    command: Annotated[
        tuple[str, ...],
        documented(
            "instead of these: a command, run without a shell, that runs `vhpc fabric manager` on its host"
        ),
    ] = ()


class Subnet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of several subnets, or a subnet with a standby OpenSM; keys are the same in all subnets."""

    device: Annotated[str, documented("adapter through which vhpcd reads this subnet; empty: the first")] = ""
    device_port: Annotated[int, documented("its port; 0: the first port that is up", ge=0, le=254)] = 0
    managers: Annotated[
        tuple[Manager, ...],
        documented("its OpenSM instances, master and standbys; all get the new file before one reads it"),
        msgspec.Meta(min_length=1),
    ]


class Fabric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The job's own partition of a fabric: a partition key or a VLAN."""

    backend: Annotated[
        Literal["none", "opensm-file", "static-pool", "ufm-rest", "ethernet"],
        documented(
            "what applies partition keys: none (guests have no fabric), opensm-file (vhpcd writes OpenSM's "
            "partitions file for each job), static-pool (all keys are declared once, by vhpc fabric render "
            "--pool), ufm-rest (vhpcd sends requests to NVIDIA UFM), ethernet (a VLAN for each job, which "
            "nodes set on its Ethernet functions)"
        ),
    ] = "none"
    key_owner: Annotated[Literal["job", "user"], documented("owner of a key: each job, or each user")] = "job"
    pkey_first: Annotated[int, documented("first partition key of the pool", ge=0x0001, le=0x7FFE)] = 0x1000
    pkey_last: Annotated[
        int,
        documented("last partition key of the pool; 0x7fff is the default partition", ge=0x0001, le=0x7FFE),
    ] = 0x7FEF
    pkey_reserved: Annotated[tuple[int, ...], documented("keys in that range that are never allocated")] = ()
    vlan_first: Annotated[int, documented("ethernet: first VLAN of the pool", ge=2, le=4094)] = 2000
    vlan_last: Annotated[int, documented("ethernet: last VLAN of the pool", ge=2, le=4094)] = 2999
    vlan_reserved: Annotated[tuple[int, ...], documented("VLANs in that range that are never allocated")] = ()
    exhausted: Annotated[
        Literal["requeue", "refuse"],
        documented(
            "what happens to a job for which no key is free: requeue (Slurm starts it again later; with a "
            "license as large as the pool it waits in the queue instead), or refuse (it fails with a message)"
        ),
    ] = "requeue"
    rails: Annotated[
        int, documented("ports of different subnets or switches that a guest has", ge=1, le=256)
    ] = 1
    vfs: Annotated[int, documented("virtual functions of a guest on each rail", ge=1, le=256)] = 1
    quarantine_s: Annotated[
        int,
        documented("time in which a key is not used after its removal, while vhpcd runs", ge=0, le=86400),
    ] = 60
    ipoib: Annotated[bool, documented("create an IPoIB group for each key; uses one multicast LID")] = True
    partitions: Annotated[str, documented("OpenSM's partitions file, which only vhpcd may write")] = (
        "/etc/opensm/partitions.conf"
    )
    site_partitions: Annotated[
        str,
        documented("file with the site's own partitions, added to each file that vhpcd writes; empty: none"),
    ] = ""
    opensm_pidfile: Annotated[str, documented("file with OpenSM's process id")] = "/run/opensm.pid"
    opensm_log: Annotated[str, documented("OpenSM's log; OpenSM needs force_log_flush TRUE")] = (
        "/var/log/opensm.log"
    )
    apply_timeout_s: Annotated[
        int, documented("deadline for a change by OpenSM or UFM and its proof on the fabric", ge=1, le=300)
    ] = 10
    sweep_interval_s: Annotated[
        float,
        documented(
            "least time between two changes of the fabric; jobs that start or end meanwhile share one",
            ge=0,
            le=60,
        ),
    ] = 2.0
    audit_interval_s: Annotated[
        float,
        documented(
            "how often the whole fabric is compared with the keys in use. At a job's start vhpcd reads only "
            "the tables of the job's ports if it has read all tables within twice this time",
            gt=0,
            le=300,
        ),
    ] = 5.0
    open_deadline_s: Annotated[
        int,
        documented(
            "vhpcd repairs an open fabric (ports that must not communicate can do so) at once; if it stays "
            "open for this time, vhpcd grants no lease with a key, and nodes end guests that have one. If "
            "only a port of a job lacks the job's key for this time, only the guests of this job end",
            ge=0,
            le=3600,
        ),
    ] = 60
    unread_deadline_s: Annotated[
        int,
        documented(
            "the same for a fabric that could be open because a part of it cannot be read (ports that do not "
            "answer, files and logs of an OpenSM, UFM). Must be longer than a restart of a standby takes",
            ge=0,
            le=86400,
        ),
    ] = 300
    lost_after_s: Annotated[
        int,
        documented(
            "a node that has not acknowledged the end of a job for this time may still run its guests: the "
            "key is removed from the fabric and not used until the node acknowledges or is fenced",
            ge=1,
            le=86400,
        ),
    ] = 900
    max_lost_percent: Annotated[
        int,
        documented(
            "vhpcd writes no file that removes more than this percentage of keys whose end is not in its "
            "database: such a file was written from another database",
            ge=0,
            le=100,
        ),
    ] = 0
    device: Annotated[str, documented("adapter through which vhpcd reads the fabric; empty: the first")] = ""
    device_port: Annotated[int, documented("its port; 0: the first port that is up", ge=0, le=254)] = 0
    subnets: Annotated[
        tuple[Subnet, ...],
        documented(
            "opensm-file with several subnets or several OpenSM instances; empty: one subnet with one "
            "OpenSM, described by `partitions`, `opensm_pidfile`, `opensm_log` and `device`"
        ),
    ] = ()
    port_map: Annotated[
        str,
        documented(
            "opensm-file: file with the nodes' ports if their GUIDs are fixed (whole adapters): "
            "lines NODE RAIL 0xGUID, read when vhpcd starts; empty: nodes give their virtual functions GUIDs "
            "that are derived from the key"
        ),
    ] = ""
    in_guests: Annotated[
        bool,
        documented(
            "the site itself passes the ports of port_map to the guests: a job starts only when each of "
            "its guests reports them active with exactly its keys, as is always required of virtual functions"
        ),
    ] = False
    ipoib_network: Annotated[
        str,
        documented(
            "IPv4 network such as 10.128.0.0/12, from which each guest with InfiniBand ports gets an address "
            "on its job's key; in the guests the names of the job's nodes resolve to these; empty: none"
        ),
    ] = ""
    guest_timeout_s: Annotated[
        int, documented("how long a guest may wait for its ports to be active with its keys", ge=1, le=600)
    ] = 30
    pool_guests: Annotated[
        int,
        documented(
            "static-pool: guests for which each key is declared; larger jobs are refused", ge=1, le=65536
        ),
    ] = 64
    ufm_url: Annotated[str, documented("ufm-rest: UFM's address, https://HOST[:PORT]")] = ""
    ufm_token_file: Annotated[
        str,
        documented("ufm-rest: file with a UFM access token, for vhpcd's user only; read at each request"),
    ] = "/etc/vhpc/ufm.token"  # noqa: S105 - the name of a file
    ufm_ca: Annotated[
        str,
        documented("ufm-rest: CA certificates (PEM) for UFM's certificate; empty: those of the system"),
    ] = ""
    ufm_request_timeout_s: Annotated[
        int,
        documented("ufm-rest: deadline of a request; apply_timeout_s is that of a change", ge=1, le=300),
    ] = 5
    ufm_proof: Annotated[
        Literal["fabric", "ufm"],
        documented(
            "ufm-rest: proof that a key is applied: fabric (UFM's reply and the ports' tables, read "
            "through `device`), or ufm (UFM's reply only, if vhpcd's host has no port)"
        ),
    ] = "fabric"
    ufm_mark_pkey: Annotated[
        int,
        documented(
            "ufm-rest: key outside of the pool whose one member records which database changed UFM last",
            ge=0x0001,
            le=0x7FFE,
        ),
    ] = 0x0FFF
