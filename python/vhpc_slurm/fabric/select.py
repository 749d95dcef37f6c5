# SPDX-License-Identifier: Apache-2.0
"""Builds backends, pools and readers from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Network
from pathlib import Path

from vhpc_slurm.config.fabric import Fabric, Manager
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import partitions, plainfile, portmap
from vhpc_slurm.fabric.backend import KeyPolicy, NetworkBackend, NoNetwork
from vhpc_slurm.fabric.fence import ALONE, FabricWriter
from vhpc_slurm.fabric.managers import Managers, RemoteOpensm, SeveralReaders
from vhpc_slurm.fabric.numbers import MAX_ETHERNET_RAILS, MAX_RANKS, VLANS, KeyPool
from vhpc_slurm.fabric.opensm import MAX_FILE, Opensm, SubnetManager
from vhpc_slurm.fabric.opensm_file import OpensmFile
from vhpc_slurm.fabric.partitions import IbPartition
from vhpc_slurm.fabric.portmap import PortMap
from vhpc_slurm.fabric.readback import Readback
from vhpc_slurm.fabric.segment_pool import SegmentPool
from vhpc_slurm.fabric.smp import FabricReader
from vhpc_slurm.fabric.static_pool import StaticPool
from vhpc_slurm.fabric.ufm_client import UfmClient
from vhpc_slurm.fabric.ufm_rest import UfmRest

SMALLEST_NETWORK = 30
"""The longest prefix that leaves room for two addresses."""
FRESH = 2
"""For so many audit intervals tables that were read prove that ports do not have a new job's key."""


def backend(
    fabric: Fabric, knows: Callable[[int, str], bool], writer: FabricWriter = ALONE
) -> NetworkBackend:
    """The backend that the configuration names; nothing is started or changed yet.

    ``knows`` says whether the database has had an epoch of that number and tag; ``writer`` is this vhpcd.

    Raises:
        FabricError: the configuration of the keys is invalid.
    """
    if fabric.backend == "none":
        return NoNetwork()
    if fabric.backend == "ethernet":
        return _segment_pool(fabric)
    pool, site = key_pool(fabric), site_partitions(fabric)
    static = fabric.backend == "static-pool"
    limit = fabric.pool_guests if static else MAX_RANKS
    policy = KeyPolicy(
        pool,
        fabric.rails,
        fabric.vfs,
        limit,
        port_map(fabric),
        fabric.in_guests,
        site,
        ipoib_network(fabric),
    )
    readback = Readback(reader(fabric), fabric.apply_timeout_s, FRESH * fabric.audit_interval_s)
    if static:
        return StaticPool(policy, readback, static_pool(fabric), site, Path(fabric.partitions))
    if fabric.backend == "ufm-rest":
        return _ufm_rest(fabric, policy, readback, knows, writer)
    return OpensmFile(
        policy,
        _managers(fabric, writer),
        readback,
        knows,
        site=site,
        ipoib=fabric.ipoib,
        max_lost_percent=fabric.max_lost_percent,
    )


def _segment_pool(fabric: Fabric) -> SegmentPool:
    pool = KeyPool(fabric.vlan_first, fabric.vlan_last, frozenset(fabric.vlan_reserved), VLANS)
    if fabric.rails > MAX_ETHERNET_RAILS:
        raise FabricError(
            f"{fabric.rails} rails are too many", f"a MAC address has room for {MAX_ETHERNET_RAILS}"
        )
    return SegmentPool(KeyPolicy(pool, fabric.rails, fabric.vfs))


def local_opensm(fabric: Fabric, writer: FabricWriter = ALONE) -> Opensm:
    """The OpenSM of this host, as the keys of [fabric] itself describe it."""
    return Opensm(
        Path(fabric.partitions),
        Path(fabric.opensm_pidfile),
        Path(fabric.opensm_log),
        fabric.apply_timeout_s,
        writer,
    )


def _managers(fabric: Fabric, writer: FabricWriter) -> SubnetManager:
    if not fabric.subnets:
        return local_opensm(fabric, writer)
    timeout_s = float(fabric.apply_timeout_s)
    return Managers(
        [[manager(one, timeout_s, writer) for one in subnet.managers] for subnet in fabric.subnets],
        timeout_s,
    )


def descriptions(fabric: Fabric) -> tuple[Manager, ...]:
    """All OpenSM that the configuration names."""
    if fabric.subnets:
        return tuple(one for subnet in fabric.subnets for one in subnet.managers)
    files = (fabric.partitions, fabric.opensm_pidfile, fabric.opensm_log)
    return (Manager(partitions=files[0], pidfile=files[1], log=files[2]),)


def manager(one: Manager, timeout_s: float, writer: FabricWriter = ALONE) -> Opensm | RemoteOpensm:
    """The OpenSM of a description; FabricError when the description is incomplete."""
    files = (one.partitions, one.pidfile, one.log)
    if one.command and not any(files):
        return RemoteOpensm(one.command, timeout_s, writer)
    if one.command or not all(files):
        raise FabricError(
            "a manager in fabric.subnets is incomplete",
            f"it has {one}",
            "give it partitions, pidfile and log, or a command",
        )
    return Opensm(Path(one.partitions), Path(one.pidfile), Path(one.log), timeout_s, writer)


def reader(fabric: Fabric) -> FabricReader | SeveralReaders:
    """The reader of all subnets."""
    if not fabric.subnets:
        return FabricReader(fabric.device, fabric.device_port)
    return SeveralReaders([FabricReader(one.device, one.device_port) for one in fabric.subnets])


def ufm(fabric: Fabric, writer: FabricWriter = ALONE) -> UfmClient:
    """The UFM of the configuration; FabricError when its address is invalid."""
    return UfmClient(
        fabric.ufm_url,
        Path(fabric.ufm_token_file),
        fabric.ufm_ca,
        float(fabric.ufm_request_timeout_s),
        writer,
    )


def _ufm_rest(
    fabric: Fabric,
    policy: KeyPolicy,
    readback: Readback,
    knows: Callable[[int, str], bool],
    writer: FabricWriter,
) -> UfmRest:
    return UfmRest(
        policy,
        ufm(fabric, writer),
        readback if fabric.ufm_proof == "fabric" else None,
        knows,
        mark_pkey=fabric.ufm_mark_pkey,
        ipoib=fabric.ipoib,
        timeout_s=fabric.apply_timeout_s,
        max_lost_percent=fabric.max_lost_percent,
    )


def static_pool(fabric: Fabric) -> tuple[IbPartition, ...]:
    """The partitions of the static pool, without the site's own."""
    return partitions.of_pool(
        key_pool(fabric),
        ranks=fabric.pool_guests,
        rails=fabric.rails,
        vfs=fabric.vfs,
        ipoib=fabric.ipoib,
    )


def port_map(fabric: Fabric) -> PortMap | None:
    """The ports with fixed GUIDs; None where nodes set GUIDs.

    Raises:
        FabricError: the file cannot be read or is invalid, or the backend cannot use it.
    """
    if not fabric.port_map:
        if fabric.in_guests:
            raise FabricError(
                "fabric.in_guests needs fabric.port_map",
                "without it nodes set the GUIDs, and guests are always checked",
            )
        return None
    if fabric.backend != "opensm-file":
        raise FabricError(
            f"fabric.port_map cannot be used with backend {fabric.backend}",
            "that backend recognizes ports by the GUIDs that nodes set",
        )
    try:
        text = _text(fabric.port_map).decode()
    except UnicodeDecodeError as err:
        raise FabricError(f"cannot read {fabric.port_map}", str(err)) from err
    return portmap.parse(text, fabric.port_map)


def ipoib_network(fabric: Fabric) -> IPv4Network | None:
    """The network for addresses of guests; None: they have none.

    Raises:
        FabricError: it is not a network, too small for two guests, or IPoIB is off.
    """
    if not fabric.ipoib_network:
        return None
    what = f"fabric.ipoib_network = {fabric.ipoib_network[:40]!r}"
    if not fabric.ipoib:
        raise FabricError(f"{what} needs fabric.ipoib")
    try:
        network = IPv4Network(fabric.ipoib_network)
    except ValueError as err:
        raise FabricError(f"{what} is not an IPv4 network", str(err), "such as 10.128.0.0/12") from err
    if not 1 <= network.prefixlen <= SMALLEST_NETWORK:
        raise FabricError(f"{what} has no room for two guests", "", "such as 10.128.0.0/12")
    return network


def key_pool(fabric: Fabric) -> KeyPool:
    """The pool of keys for jobs; FabricError when the range is invalid."""
    return KeyPool(fabric.pkey_first, fabric.pkey_last, frozenset(fabric.pkey_reserved))


def site_partitions(fabric: Fabric) -> tuple[IbPartition, ...]:
    """The site's own partitions.

    Raises:
        FabricError: the file cannot be read, the linter refuses it, or it has a key of the pool.
    """
    if not fabric.site_partitions:
        return ()
    found = partitions.parse(_text(fabric.site_partitions), fabric.site_partitions)
    pool = frozenset(key_pool(fabric).numbers())
    for one in found:
        if one.pkey in pool:
            raise FabricError(
                f"{fabric.site_partitions} has the key {one.pkey:#06x}",
                "it belongs to the pool of keys for jobs",
                "name it in fabric.pkey_reserved, or change fabric.pkey_first and fabric.pkey_last",
            )
        if one.name.startswith("key_"):
            raise FabricError(
                f"{fabric.site_partitions} has a partition named {one.name}",
                "names that begin with key_ are for jobs",
            )
    return found[1:]


def _text(name: str) -> bytes:
    data = plainfile.read_file(Path(name), MAX_FILE)
    if data is None:
        raise FabricError(f"cannot read {name}", "No such file or directory")
    return data
