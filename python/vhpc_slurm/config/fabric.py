# SPDX-License-Identifier: Apache-2.0
"""The table [fabric] of vhpc.toml: every key of it, its meaning and its default."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from vhpc_slurm.config.setting import documented


class Manager(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One OpenSM of a subnet: its three files on vhpcd's host, or a command that reaches its host."""

    partitions: Annotated[str, documented("its partitions file, as fabric.partitions")] = ""
    pidfile: Annotated[str, documented("its pidfile, as fabric.opensm_pidfile")] = ""
    log: Annotated[str, documented("its log, as fabric.opensm_log")] = ""
    command: Annotated[
        tuple[str, ...],
        documented(
            "in place of these: a command, run without a shell, that runs `vhpc fabric manager` on its host"
        ),
    ] = ()


class Subnet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One subnet of several, or one with an OpenSM that stands by; keys are the same in all."""

    device: Annotated[str, documented("adapter that this subnet is read through; empty: the first")] = ""
    device_port: Annotated[int, documented("port of it; 0: the first that is up", ge=0, le=254)] = 0
    managers: Annotated[
        tuple[Manager, ...],
        documented("its OpenSM, master and those that stand by; all have the new file before one reads it"),
        msgspec.Meta(min_length=1),
    ]


class Fabric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The job's own partition of a fabric: a partition key, a VLAN or a VNI."""

    backend: Annotated[
        Literal["none", "opensm-file", "static-pool", "ufm-rest", "ethernet", "vxlan"],
        documented(
            "who applies partition keys: none (guests have no fabric), opensm-file (vhpcd writes OpenSM's "
            "partitions file for each job), static-pool (all keys are declared once, by vhpc fabric render "
            "--pool), ufm-rest (vhpcd asks NVIDIA UFM for each job), ethernet (a VLAN for each job, which "
            "nodes set on its Ethernet functions), vxlan (a VNI for each job, which nodes do not apply yet)"
        ),
    ] = "none"
    key_owner: Annotated[Literal["job", "user"], documented("who has a key: each job, or each user")] = "job"
    pkey_first: Annotated[int, documented("first partition key of the pool", ge=0x0001, le=0x7FFE)] = 0x1000
    pkey_last: Annotated[
        int,
        documented("last partition key of the pool; 0x7fff is the default partition", ge=0x0001, le=0x7FFE),
    ] = 0x7FEF
    pkey_reserved: Annotated[tuple[int, ...], documented("keys in that range that are never handed out")] = ()
    vlan_first: Annotated[int, documented("ethernet: first VLAN of the pool", ge=2, le=4094)] = 2000
    vlan_last: Annotated[int, documented("ethernet: last VLAN of the pool", ge=2, le=4094)] = 2999
    vlan_reserved: Annotated[
        tuple[int, ...], documented("VLANs in that range that are never handed out")
    ] = ()
    vni_first: Annotated[int, documented("vxlan: first VNI of the pool", ge=1, le=0xFFFFFF)] = 100000
    vni_last: Annotated[int, documented("vxlan: last VNI of the pool", ge=1, le=0xFFFFFF)] = 104095
    vni_reserved: Annotated[tuple[int, ...], documented("VNIs in that range that are never handed out")] = ()
    exhausted: Annotated[
        Literal["requeue", "refuse"],
        documented(
            "what becomes of a job for which no key is free: requeue (Slurm starts it again later; a license "
            "as large as the pool lets it wait in the queue instead), or refuse (it fails, and says why)"
        ),
    ] = "requeue"
    rails: Annotated[
        int, documented("ports of different subnets or switches that a guest has", ge=1, le=256)
    ] = 1
    vfs: Annotated[int, documented("virtual functions of a guest on each rail", ge=1, le=256)] = 1
    quarantine_s: Annotated[
        int, documented("how long a key rests after it was stripped, while vhpcd runs", ge=0, le=86400)
    ] = 60
    ipoib: Annotated[bool, documented("make an IPoIB group for each key; costs a multicast LID")] = True
    partitions: Annotated[str, documented("OpenSM's partitions file, which vhpcd alone writes")] = (
        "/etc/opensm/partitions.conf"
    )
    site_partitions: Annotated[
        str,
        documented("file with partitions of the site's own, added to each that vhpcd writes; empty: none"),
    ] = ""
    opensm_pidfile: Annotated[str, documented("file with OpenSM's process id")] = "/run/opensm.pid"
    opensm_log: Annotated[str, documented("OpenSM's log; OpenSM needs force_log_flush TRUE")] = (
        "/var/log/opensm.log"
    )
    apply_timeout_s: Annotated[
        int, documented("deadline for OpenSM or UFM to do it, and for the fabric to show it", ge=1, le=300)
    ] = 10
    sweep_interval_s: Annotated[
        float,
        documented(
            "least time between two changes of the fabric; jobs that start or end meanwhile share the next",
            ge=0,
            le=60,
        ),
    ] = 2.0
    audit_interval_s: Annotated[
        float, documented("how often the whole fabric is compared with the keys in use", gt=0, le=300)
    ] = 5.0
    open_deadline_s: Annotated[
        int,
        documented(
            "an open fabric (ports can talk that should not) is put right at once; where that does not work "
            "for so long, no lease with a key is handed out, and nodes end guests that have one. The guests "
            "of a job end alone when a port of theirs lacks the job's key for so long",
            ge=0,
            le=3600,
        ),
    ] = 60
    unread_deadline_s: Annotated[
        int,
        documented(
            "the same for a fabric of which a part cannot be read (ports that do not answer, files and logs "
            "of an OpenSM, UFM): it could be open. Longer than a restart of a standby takes",
            ge=0,
            le=86400,
        ),
    ] = 300
    lost_after_s: Annotated[
        int,
        documented(
            "a node that has not acknowledged the end of a job for so long may still run its guests: the key "
            "is taken off the fabric and stays out of use until the node says so, or is fenced",
            ge=1,
            le=86400,
        ),
    ] = 900
    max_lost_percent: Annotated[
        int,
        documented(
            "vhpcd writes no file that drops more than so many of a hundred keys which it does not know to "
            "have ended: its database is not the one that wrote them",
            ge=0,
            le=100,
        ),
    ] = 0
    device: Annotated[str, documented("adapter that the fabric is read through; empty: the first")] = ""
    device_port: Annotated[int, documented("port of it; 0: the first that is up", ge=0, le=254)] = 0
    subnets: Annotated[
        tuple[Subnet, ...],
        documented(
            "opensm-file with several subnets or several OpenSM; empty: one subnet with one OpenSM, as "
            "`partitions`, `opensm_pidfile`, `opensm_log` and `device` say"
        ),
    ] = ()
    port_map: Annotated[
        str,
        documented(
            "opensm-file: file with the ports that nodes have, where their GUIDs are fixed (whole adapters): "
            "lines NODE RAIL 0xGUID, read when vhpcd starts; empty: nodes give their virtual functions GUIDs "
            "that follow from the key"
        ),
    ] = ""
    in_guests: Annotated[
        bool,
        documented(
            "the ports of port_map reach the guests, by the site's own means: a job starts only when each of "
            "its guests shows them active with exactly its keys, as it does for virtual functions in any case"
        ),
    ] = False
    ipoib_network: Annotated[
        str,
        documented(
            "IPv4 network such as 10.128.0.0/12, of which each guest with InfiniBand ports gets an address "
            "on its job's key; the names of the job's nodes then lead there in its guests; empty: none"
        ),
    ] = ""
    guest_timeout_s: Annotated[
        int, documented("how long a guest may wait for its ports to be active with its keys", ge=1, le=600)
    ] = 30
    pool_guests: Annotated[
        int,
        documented(
            "static-pool: guests that each key is declared for; larger jobs are refused", ge=1, le=65536
        ),
    ] = 64
    ufm_url: Annotated[str, documented("ufm-rest: UFM's address, https://HOST[:PORT]")] = ""
    ufm_token_file: Annotated[
        str,
        documented("ufm-rest: file with an access token of UFM, for vhpcd's user only; read at each request"),
    ] = "/etc/vhpc/ufm.token"  # noqa: S105 - the name of a file
    ufm_ca: Annotated[
        str,
        documented("ufm-rest: certificates (PEM) that UFM's is checked against; empty: those of the system"),
    ] = ""
    ufm_request_timeout_s: Annotated[
        int,
        documented("ufm-rest: deadline of one request; that of a change is apply_timeout_s", ge=1, le=300),
    ] = 5
    ufm_proof: Annotated[
        Literal["fabric", "ufm"],
        documented(
            "ufm-rest: what proves that a key is applied: fabric (UFM says so, and the tables of the ports "
            "that can be read through `device`), or ufm (its word only: vhpcd's host has no port)"
        ),
    ] = "fabric"
    ufm_mark_pkey: Annotated[
        int,
        documented(
            "ufm-rest: key outside of the pool whose one member says which database changed UFM last",
            ge=0x0001,
            le=0x7FFE,
        ),
    ] = 0x0FFF
