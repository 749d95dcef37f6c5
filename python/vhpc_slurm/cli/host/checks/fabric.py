# SPDX-License-Identifier: Apache-2.0
"""The fabric: OpenSM and its options, UFM, and the partition key tables of ports."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.config import Config
from vhpc_slurm.config.fabric import Fabric, Manager
from vhpc_slurm.errors import FabricError
from vhpc_slurm.fabric import partitions
from vhpc_slurm.fabric.managers import RemoteOpensm
from vhpc_slurm.fabric.numbers import DEFAULT_PKEY, FULL
from vhpc_slurm.fabric.opensm_options import OpensmOptions, of_process
from vhpc_slurm.fabric.select import descriptions, key_pool, manager, reader, ufm
from vhpc_slurm.fabric.smp import Scan

SHOWN = 3
CROWDED = 0.75
"""A table with more than this part of its entries in use is a warning."""


def applies(config: Config) -> bool:
    """Whether this host, the controller or another one, runs an OpenSM that vhpcd manages."""
    return config.fabric.backend in ("opensm-file", "static-pool") and any(
        one.pidfile and Path(one.pidfile).exists() for one in descriptions(config.fabric)
    )


def check(config: Config, *, root: bool) -> Iterator[CheckResult]:
    """All results for the fabric; none when guests have no fabric."""
    fabric = config.fabric
    if fabric.backend in ("none", "ethernet"):
        return
    if not root:
        yield warn("fabric", "the fabric was not checked", "run vhpc doctor as root")
        return
    if fabric.backend == "ufm-rest":
        yield from _ufm(fabric)
    else:
        for one in descriptions(fabric):
            yield from _manager(config, one)
    if fabric.backend != "ufm-rest" or fabric.ufm_proof == "fabric":
        yield from _tables(fabric)


# --- one OpenSM ------------------------------------------------------------------------------


def _manager(config: Config, one: Manager) -> Iterator[CheckResult]:
    fabric = config.fabric
    elsewhere = fabric.backend == "static-pool" and not Path(one.partitions).exists()
    if elsewhere:
        yield warn(
            "fabric.file",
            f"{one.partitions} is not on this host, so it was not checked whether it declares the pool",
            "run on the subnet manager's host: vhpc fabric render --pool >FILE, and vhpc fabric lint FILE",
        )
        return
    try:
        found = manager(one, float(fabric.apply_timeout_s))
    except FabricError as err:
        yield error("fabric.subnets", err.line(), "see fabric.subnets in vhpc.toml(5)")
        return
    yield _file(found.read, str(found.partitions))
    if isinstance(found, RemoteOpensm):
        yield _remote(found)
        return
    try:
        pid = found.pid()
        options = of_process(pid)
    except FabricError as err:
        yield error("fabric.opensm", err.line(), "start OpenSM, or correct fabric.opensm_pidfile")
        return
    yield ok(
        "fabric.opensm", f"OpenSM is process {pid}" + (f", with {options.config}" * bool(options.config))
    )
    if fabric.backend == "opensm-file":
        yield _writable(config.controller.user, Path(one.partitions), pid)
    yield from _paths(one, options)
    yield from _options(options)


def _remote(found: RemoteOpensm) -> CheckResult:
    try:
        with closing(found):
            found.check()
    except FabricError as err:
        return error("fabric.opensm", err.line(), "vhpcd changes no key until it can reach that OpenSM")
    return ok("fabric.opensm", f"OpenSM runs on the host of {found.partitions}; run vhpc doctor there")


def _file(read: Callable[[], bytes | None], name: str) -> CheckResult:
    try:
        data = read()
    except FabricError as err:
        return error("fabric.file", err.line(), "let vhpcd read and replace it")
    if data is None:
        return error(
            "fabric.file",
            f"{name} does not exist: OpenSM makes every port a full member of the default partition",
            "vhpc fabric render >FILE, move it there, and restart vhpcd",
        )
    defects = partitions.lint(data)
    if defects:
        return error(
            "fabric.file", f"{name} line {defects[0].line}: {defects[0].reason}", "vhpc fabric lint FILE"
        )
    return ok("fabric.file", f"{name} has {len(partitions.parse(data)) - 1} keys; Default is limited for all")


def _writable(user: str, file: Path, pid: int) -> CheckResult:
    """Whether vhpcd's user can replace the file and signal OpenSM."""
    try:
        account = pwd.getpwnam(user)
        folder = file.parent.stat()
        opensm = Path(f"/proc/{pid}").stat()
    except (KeyError, OSError) as err:
        return error(
            "fabric.writable",
            f"cannot find out whether {user} can replace {file}: {err}",
            "see controller.user",
        )
    if account.pw_uid == 0:
        return ok("fabric.writable", f"vhpcd is root, and can replace {file}")
    groups = {account.pw_gid, *os.getgrouplist(user, account.pw_gid)}
    mine = (
        (folder.st_uid == account.pw_uid and folder.st_mode & 0o300 == 0o300)
        or (folder.st_gid in groups and folder.st_mode & 0o030 == 0o030)
        or folder.st_mode & 0o003 == 0o003
    )
    if not mine:
        return error(
            "fabric.writable",
            f"{user} cannot write into {file.parent}, where vhpcd replaces {file.name}",
            f"put OpenSM's partitions file into a separate folder that belongs to {user}",
        )
    if opensm.st_uid != account.pw_uid:
        return warn(
            "fabric.writable",
            f"{user} can replace {file} but cannot signal OpenSM, which runs as uid {opensm.st_uid}",
            "give vhpcd's unit AmbientCapabilities=CAP_KILL, or run it as that user",
        )
    return ok("fabric.writable", f"{user} can replace {file} and signal OpenSM")


def _paths(one: Manager, options: OpensmOptions) -> Iterator[CheckResult]:
    for check, option, meant, argument in (
        ("fabric.partitions", "partition_config_file", one.partitions, "-P"),
        ("fabric.log", "log_file", one.log, "-f"),
    ):
        if _same(options[option], meant):
            yield ok(check, f"OpenSM's {option} is {meant}")
        else:
            yield error(
                check,
                f"OpenSM's {option} is {options[option]}, but vhpc.toml has {meant}",
                f"start OpenSM with {argument} {meant}, or correct [fabric]",
            )
    if not options.on("force_log_flush"):
        yield error(
            "fabric.log-flush",
            "OpenSM buffers its log, so vhpcd cannot see the end of a sweep",
            "force_log_flush TRUE in opensm.conf",
        )


def _same(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _options(options: OpensmOptions) -> Iterator[CheckResult]:
    enforce = "off" if options.on("no_partition_enforcement") else options["part_enforce"]
    if enforce == "both":
        yield ok("fabric.enforcement", "switches enforce partitions in both directions")
    else:
        yield warn(
            "fabric.enforcement",
            f"switches enforce partitions: {enforce}",
            "part_enforce both in opensm.conf: switches then drop packets with a key that the host lacks",
        )
    for name, default, why in (
        ("sa_key", 1, "every host can make trusted requests to the subnet administrator"),
        ("sm_key", 1, "any host can take over as subnet manager"),
        (
            "m_key",
            0,
            "any user of a port's queue pair 0 can reconfigure ports; set it where guests get whole adapters",
        ),
    ):
        if options.number(name) in (default, -1):
            yield warn(
                f"fabric.{name}",
                f"{name} is OpenSM's default: {why}",
                f"set {name} in opensm.conf, to the same value on all subnet managers",
            )
        else:
            yield ok(f"fabric.{name}", f"{name} is set")
    if options.number("m_key") > 0 and options.number("m_key_protection_level") < 2:
        yield warn(
            "fabric.m_key-protection",
            "m_key is set, but any port can read it",
            "m_key_protection_level 2 in opensm.conf",
        )
    if options.on("keep_pkey_indexes"):
        yield ok("fabric.keep_pkey_indexes", "a key keeps its index in a port's table")
    else:
        yield warn(
            "fabric.keep_pkey_indexes",
            "OpenSM may move a key to another index of a port's table while queue pairs use it",
            "keep_pkey_indexes TRUE in opensm.conf",
        )
    if options.on("allow_both_pkeys"):
        yield warn(
            "fabric.allow_both_pkeys",
            "a port can be full and limited member of the same partition",
            "allow_both_pkeys FALSE in opensm.conf: vhpc does not need it",
        )


# --- UFM --------------------------------------------------------------------------------------


def _ufm(fabric: Fabric) -> Iterator[CheckResult]:
    try:
        client = ufm(fabric)
        yield ok("fabric.ufm", f"UFM {client.version()} at {fabric.ufm_url} accepts the token")
        settings, default = client.settings(), client.default_membership()
    except FabricError as err:
        yield error("fabric.ufm", err.line(), "see fabric.ufm_url, ufm_token_file and ufm_ca in vhpc.toml(5)")
        return
    if default == "limited":
        yield ok("fabric.default", "ports are limited members of the default partition")
    elif default == "full":
        yield error(
            "fabric.default",
            "ports are full members of the default partition, so all guests reach each other",
            "default_membership = limited in UFM's configuration",
        )
    else:
        yield warn(
            "fabric.default",
            "this UFM does not report the default membership of ports",
            "check its partitions.conf: Default=0x7fff must have ALL=limited",
        )
    for name, value, bad in (
        ("sa_key", settings.sa_key, 1),
        ("sm_key", settings.sm_key, 1),
        ("m_key", settings.m_key, 0),
    ):
        try:
            unset = int(value, 16) == bad
        except ValueError:
            unset = True
        if unset and not (name == "m_key" and settings.m_key_per_port):
            yield warn(
                f"fabric.{name}", f"UFM's {name} is the default value", f"set {name} in UFM's opensm.conf"
            )
        else:
            yield ok(f"fabric.{name}", f"UFM has a {name}")


# --- tables of ports ----------------------------------------------------------------------------


def _tables(fabric: Fabric) -> Iterator[CheckResult]:
    try:
        with closing(reader(fabric)) as one:
            scan = one.scan(float(fabric.apply_timeout_s))
    except FabricError as err:
        yield error("fabric.read", err.line(), "vhpcd must be able to read the fabric")
        return
    if scan.silent:
        yield warn(
            "fabric.read", f"{scan.silent} nodes of the fabric do not answer", "see ibnetdiscover, ibdiagnet"
        )
    else:
        yield ok("fabric.read", f"{len(scan.ports)} ports and {len(scan.switches)} switches were read")
    yield _master(fabric, scan)
    yield from _default(scan)
    yield from _room(fabric, scan)


def _master(fabric: Fabric, scan: Scan) -> CheckResult:
    masters = [port for port in scan.ports if port.master]
    names = ", ".join(f"{port.guid:#018x}" for port in masters) or "none"
    subnets = max(1, len(fabric.subnets))
    if len(masters) != subnets:
        return error(
            "fabric.master",
            f"{subnets} subnets have {len(masters)} ports with a master subnet manager: {names}",
            "start OpenSM, and check its log",
        )
    if fabric.backend != "ufm-rest" and not all(port.local for port in masters):
        return warn(
            "fabric.master",
            f"the master subnet manager is at port {names}, which is on another host",
            "list every OpenSM that can become master in fabric.subnets",
        )
    return ok("fabric.master", f"the master subnet manager is at port {names}")


def _default(scan: Scan) -> Iterator[CheckResult]:
    full = [port for port in scan.ports if DEFAULT_PKEY | FULL in port.pkeys and not port.master]
    if full:
        yield error(
            "fabric.default",
            f"{len(full)} ports are full members of the default partition, and reach every guest: "
            + ", ".join(f"{port.guid:#018x}" for port in full[:SHOWN]),
            "Default=0x7fff must be ALL=limited, SELF=full: vhpc fabric lint FILE; where OpenSM cannot read "
            "the file, its log says PARSE ERROR",
        )
    else:
        yield ok(
            "fabric.default", "no port but the subnet manager's is a full member of the default partition"
        )


def _room(fabric: Fabric, scan: Scan) -> Iterator[CheckResult]:
    if not scan.ports:
        return
    least = min(port.room for port in scan.ports)
    crowded = [port for port in scan.ports if len(port.pkeys) > CROWDED * port.room]
    text = f"ports have room for {least} keys or more"
    if least < 2:
        yield error("fabric.room", text, "a guest's port needs two keys: its job's and the default one")
    elif crowded:
        yield warn(
            "fabric.room",
            f"the tables of {len(crowded)} ports are nearly full, the first is {crowded[0].guid:#018x} with "
            f"{len(crowded[0].pkeys)} of {crowded[0].room} keys",
            "once a table is full, the port cannot get the key of another job",
        )
    else:
        yield ok("fabric.room", text)
    silent = [one for one in scan.switches if one.enforced == 0]
    if silent:
        yield warn(
            "fabric.switches",
            f"{len(silent)} switches enforce no partitions, the first is {silent[0].guid:#018x}",
            "replace them: they do not stop packets that a host sends with a foreign key",
        )
    elif scan.switches:
        keys = min(one.enforced for one in scan.switches)
        yield ok(
            "fabric.switches", f"switches enforce {keys} keys a port or more: all keys of one host's guests"
        )
    groups = min((one.groups for one in scan.switches), default=0)
    pool = sum(1 for _ in key_pool(fabric).numbers())
    if fabric.ipoib and scan.switches and groups < pool:
        yield warn(
            "fabric.groups",
            f"the pool has {pool} keys with an IPoIB group each, but switches support only {groups} groups",
            "make the pool smaller, or set fabric.ipoib = false",
        )
