# SPDX-License-Identifier: Apache-2.0
"""`vlab up`, `deploy` and `down`: start a cluster from any state, update it, and remove it."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from vlablib import cgroups, packages, services, slurmtree
from vlablib.cluster import configure, database_password, make_shared_folders
from vlablib.deploy import Deployment, deploy
from vlablib.hosts import end, remove_files, run, start_host, start_lab
from vlablib.machine import Machine, real_kvm
from vlablib.recipe import BARE, DEFAULT_SUITE, OTHER, PACKAGED, SUITES, named
from vlablib.report import LabError, say, step
from vlablib.rootfs import acquire
from vlablib.running import find
from vlablib.services import ALL_FABRIC_UNITS, FABRIC_UNITS, UNITS, unit_in, units_of
from vlablib.settings import MAX_NODES, USERS, Lab, Record, deadline

_DEFAULT_NODES = 2
_NODES_READY_TIMEOUT_S = 60
_ACCOUNT = "users"
# vhpcd's user, which requeues lost jobs
_OPERATOR = "vhpc"
_ASSOCIATIONS = ("--noheader", "--parsable2", "list", "associations", "format=user")


@dataclass(frozen=True)
class System:
    """The system for the hosts; all None: that of the running lab, otherwise the default suite."""

    suite: str | None = None
    # folder of Debian packages that hosts get vhpc from, instead of from the checkout
    debs: Path | None = None
    # system tree that was made elsewhere
    tree: Path | None = None
    # Slurm only
    bare: bool = False
    # no libvirtd on compute nodes
    light: bool = False

    def check(self) -> None:
        """Raise LabError if the options exclude each other, or lab hosts cannot run on the tree."""
        if self.debs is not None and self.suite not in (None, DEFAULT_SUITE):
            raise LabError(f"--packages excludes suites other than {DEFAULT_SUITE}")
        if self.tree is not None and (self.suite is not None or self.debs is not None):
            raise LabError("--tree excludes --suite and --packages: the tree is the system")
        if self.bare and (self.debs is not None or self.tree is not None):
            raise LabError("--bare excludes --packages and --tree: its hosts have Slurm only")
        if self.light and (self.bare or self.debs is not None):
            raise LabError("--light excludes --bare and --packages: its nodes run the checkout's hooks")
        if self.bare and (self.suite or DEFAULT_SUITE) not in BARE:
            raise LabError(f"--bare has no suite {self.suite}; known: {', '.join(sorted(BARE))}")
        if self.tree is not None:
            slurmtree.check(self.tree)


def up(
    lab: Lab, system: System, nodes: int | None, *, fabric: bool | None, controllers: int | None = None
) -> None:
    """Start the lab, or its missing parts.

    Args:
        lab: its folders.
        system: the hosts' system.
        nodes: number of compute nodes; None: that of the running lab, otherwise 2.
        fabric: whether there is a simulated fabric; None: as in the running lab, otherwise no.
        controllers: number of hosts with slurmctld and vhpcd; None: that of the running lab, otherwise 1.

    Raises:
        LabError: the lab runs another system, the tree lacks something, or a part does not start.
    """
    if nodes is not None and not 1 <= nodes <= MAX_NODES:
        raise LabError(f"--nodes {nodes}: must be between 1 and {MAX_NODES}")
    if (system.debs is not None or system.bare) and fabric:
        raise LabError("--packages and --bare exclude --fabric")
    if controllers == 2 and (system.debs is not None or system.bare):
        raise LabError("--controllers 2 excludes --packages and --bare")
    system.check()
    with lab.locked():
        record = _start(lab, system, nodes, fabric=fabric, controllers=controllers)
        make_shared_folders(lab, record)
        deployment = _deploy_before(lab, record)
        pids = _start_hosts(lab, record)
        _bring_in_line(lab, record, pids, deployment.stale | _deploy_after(record, pids))
        if record.packages:
            packages.set_up(record, pids)
    _complain(deployment)
    trial = f"lab/vlab exec -u alice login -- srun -N{record.nodes} hostname"
    slurm = slurmtree.look(Path(record.rootfs))
    where = record.rootfs if record.suite == OTHER.name else record.suite
    say(f"{where}, Slurm {slurm.version} in {slurm.prefix}, {record.nodes} nodes: ready. Try: {trial}")


def redeploy(lab: Lab) -> None:
    """Install the checkout into the running lab and restart the daemons that ran old files."""
    with lab.locked():
        record = Record.read(lab)
        pids = find(lab)
        if record is None or not set(record.hosts) <= pids.keys():
            raise LabError("the lab is not completely up; run: vlab up")
        deployment = _deploy_before(lab, record)
        _bring_in_line(lab, record, pids, deployment.stale | _deploy_after(record, pids))
    _complain(deployment)


def reboot(lab: Lab, host: str) -> None:
    """End a host at once, like a power cut, and start it again with the same disk."""
    with lab.locked():
        record = Record.read(lab)
        pids = find(lab)
        if record is None or "lab" not in pids or host not in record.hosts:
            raise LabError(f"host {host} does not run")
        if host in pids:
            end(pids[host])
        pids = _start_hosts(lab, record)
        _bring_in_line(lab, record, pids, _deploy_after(record, pids), rebooted=host)


def poweroff(lab: Lab, host: str) -> None:
    """End a host at once, like a power cut; `up` starts it again with the same disk."""
    with lab.locked():
        record = Record.read(lab)
        pids = find(lab)
        if record is None or host not in record.hosts or host not in pids:
            raise LabError(f"host {host} does not run")
        end(pids[host])


def down(lab: Lab) -> None:
    """End the lab and remove all of it except the cached trees."""
    with lab.locked():
        _end_all(lab)
        remove_files(lab)


def _deploy_before(lab: Lab, record: Record) -> Deployment:
    """Put vhpc where hosts see it; they need not run."""
    if record.bare:
        return Deployment(set(), [])
    if not record.packages:
        return deploy(lab, record)
    packages.stage(lab, Path(record.packages))
    return Deployment(set(), [])


def _deploy_after(record: Record, pids: dict[str, int]) -> set[str]:
    """Install packages on running hosts; return the units that now run old files."""
    return packages.install(record, pids) if record.packages else set()


def _complain(deployment: Deployment) -> None:
    """Raise an error for parts that could not be built, after the hosts have been updated."""
    if deployment.failures:
        reasons = "\n".join(deployment.failures)
        raise LabError(f"the hosts run, but with the previously installed files, if any:\n{reasons}")


def _start(
    lab: Lab, system: System, nodes: int | None, *, fabric: bool | None, controllers: int | None
) -> Record:
    """Start the lab's own PID 1 if necessary, and write the record."""
    pids = find(lab)
    old = Record.read(lab)
    if "lab" in pids and old is not None:
        _same_system(system, old)
        if controllers not in (None, old.controllers):
            raise LabError(f"the lab has {old.controllers} controllers; first run: vlab down")
        chosen_fabric = old.fabric if fabric is None else fabric
        folder = str(system.debs.absolute()) if system.debs else old.packages
        record = replace(old, nodes=nodes or old.nodes, fabric=chosen_fabric, packages=folder)
        record.write(lab)
        made_here = old.suite != OTHER.name
        if made_here and not Path(old.rootfs).name.endswith(named(old.suite).digest()):
            say("the recipe of the hosts' system has changed; run `vlab down` and `vlab up` to use it")
        for name in set(old.hosts) - set(record.hosts):
            _drop_host(lab, name, pids)
        return record
    _end_all(lab)
    if not real_kvm():
        say("no hardware virtualization here: guests will run in software (TCG)")
    if system.tree is not None:
        chosen, tree = OTHER, system.tree.absolute()
        fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    else:
        chosen = PACKAGED if system.debs else SUITES[system.suite or DEFAULT_SUITE]
        chosen = BARE[system.suite or DEFAULT_SUITE] if system.bare else chosen
        tree, fd = acquire(lab.cache, chosen)
    # disks of a lab that was interrupted; homes, scratch and the catalogue are kept until `down`
    shutil.rmtree(lab.data / "hosts", ignore_errors=True)
    folder = str(system.debs.absolute()) if system.debs else ""
    shutil.rmtree(lab.slurmctld, ignore_errors=True)
    record = Record(
        chosen.name,
        nodes or _DEFAULT_NODES,
        str(tree),
        bool(fabric),
        folder,
        controllers or 1,
        system.light,
    )
    record.write(lab)
    start_lab(lab, fd)
    os.close(fd)
    return record


def _same_system(system: System, old: Record) -> None:
    """Raise LabError unless the running lab has the system that is asked for."""
    if bool(system.debs) > bool(old.packages):
        raise LabError("the hosts of this lab have the checkout's files; first run: vlab down")
    if system.bare > old.bare:
        raise LabError(f"the lab runs {old.suite}; for --bare, first run: vlab down")
    if system.light > old.light:
        raise LabError("the nodes of this lab have libvirtd; for --light, first run: vlab down")
    wanted = BARE[system.suite].name if system.bare and system.suite else system.suite
    if wanted is not None and wanted != old.suite:
        raise LabError(f"the lab runs {old.suite}; for {system.suite}, first run: vlab down")
    if system.tree is not None and str(system.tree.absolute()) != old.rootfs:
        raise LabError(f"the lab runs {old.rootfs}; for {system.tree}, first run: vlab down")


def _end_all(lab: Lab) -> None:
    pids = find(lab)
    # hosts end with the lab's PID 1; a remaining host would be ended as well
    for name in sorted(pids, key=lambda name: name != "lab"):
        end(pids[name])


def _drop_host(lab: Lab, name: str, pids: dict[str, int]) -> None:
    if name in pids:
        end(pids[name])
    shutil.rmtree(lab.host_disk(name), ignore_errors=True)
    cgroups.remove(lab, name)


def _start_hosts(lab: Lab, record: Record) -> dict[str, int]:
    """Start hosts that do not run or whose start was interrupted; return all pids."""
    pids = find(lab)
    for name in record.hosts:
        # written after the last step of a start: a host without it may lack its network
        mark = lab.state / f"{name}.started"
        if name in pids and mark.exists() and mark.read_text(encoding="ascii") == str(pids[name]):
            continue
        if name in pids:
            end(pids[name])
        mark.unlink(missing_ok=True)
        pids[name] = start_host(Machine(lab, name, Path(record.rootfs)), pids["lab"])
        mark.write_text(str(pids[name]), encoding="ascii")
    return pids


def _bring_in_line(
    lab: Lab, record: Record, pids: dict[str, int], stale: set[str], rebooted: str = ""
) -> None:
    """Write configuration, restart units that are older than their files, start missing units."""
    for host in record.hosts:
        changed = stale | configure(lab, record, host, pids[host])
        for unit in units_of(host, fabric=True, controllers=record.controllers, light=record.light):
            if unit.name in changed or (unit.name in ALL_FABRIC_UNITS and not record.fabric):
                services.stop(host, pids[host], unit)
    package = lab.deployed / "python"
    if any(package.iterdir()):
        _compile(pids["ctl"])
    prefix = slurmtree.place_in_hosts(Path(record.rootfs))
    present = [
        (host, pids[host], unit)
        for host in record.hosts
        for unit in units_of(
            host, fabric=record.fabric, prefix=prefix, controllers=record.controllers, light=record.light
        )
        # with --bare somebody enables vhpcd, as on a site
        if services.installed(unit, lab, pids[host]) and not (record.bare and unit.needs)
    ]
    # first units without dependencies, then those that depend on the database
    for _, init, unit in present:
        if unit.name in ("munged", "mariadbd", "libvirtd"):
            services.start(init, unit)
    for host, init, unit in present:
        if unit.name == "munged":
            services.wait_ready(host, init, unit)
    for host, init, unit in present:
        if unit.name in FABRIC_UNITS:
            services.start(init, unit)
            services.wait_ready(host, init, unit)
    _start_databases(lab, record, pids[record.database], prefix)
    started = [services.start(init, unit, rebooted=host == rebooted) for host, init, unit in present]
    for host, init, unit in present:
        services.wait_ready(host, init, unit)
    _wait_for_nodes(pids["ctl"], record, prefix, report=any(started))


def _compile(ctl: int) -> None:
    """Write bytecode for the hooks, which start often, and not always as a user who may write it."""
    script = "exec /opt/vhpc/bin/python -m compileall -q /opt/vhpc/lib/python3.*/site-packages/vhpc_slurm"
    run(ctl, ["sh", "-c", script])


def _start_databases(lab: Lab, record: Record, host: int, prefix: str) -> None:
    """Wait for MariaDB, which has been started, and make its users; start accounting."""
    services.wait_ready(record.database, host, UNITS["mariadbd"])
    if record.controllers > 1:
        password = database_password(lab).read_text(encoding="ascii")
        statements = (
            "CREATE DATABASE IF NOT EXISTS vhpc;"
            f"CREATE USER IF NOT EXISTS vhpc@'%' IDENTIFIED BY '{password}';"
            "GRANT ALL ON vhpc.* TO vhpc@'%';"
        )
        run(host, ["mariadb", "--batch"], text=statements)
    _start_accounting(host, prefix, operator="" if record.bare else _OPERATOR)


def _start_accounting(ctl: int, prefix: str, operator: str) -> None:
    accounting = unit_in(UNITS["slurmdbd"], prefix)
    sacctmgr = f"{prefix}/bin/sacctmgr"
    if services.pid_of(ctl, accounting) is None:
        # also create the database: without it slurmdbd reconnects with a handle that a newer
        # libmariadb has cleared ("maximum allowed number of columns (=0)")
        statements = (
            "CREATE DATABASE IF NOT EXISTS slurm_acct_db;"
            "CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED VIA unix_socket;"
            "GRANT ALL ON slurm_acct_db.* TO slurm@localhost;"
        )
        run(ctl, ["mariadb", "--batch"], text=statements)
        with step("starting accounting"):
            services.start(ctl, accounting)
            services.wait_ready("its host", ctl, accounting)
    known = run(ctl, [sacctmgr, *_ASSOCIATIONS]).split()
    if not all(user.name in known for user in USERS):
        names = ",".join(user.name for user in USERS)
        _add(ctl, sacctmgr, ["cluster", "vhpc"])
        _add(ctl, sacctmgr, ["account", _ACCOUNT, "cluster=vhpc", "Description=lab", "Organization=lab"])
        _add(ctl, sacctmgr, ["user", names, f"account={_ACCOUNT}", "cluster=vhpc"])
    if operator and operator not in known:
        account = f"account={_ACCOUNT}"
        _add(ctl, sacctmgr, ["user", operator, account, "cluster=vhpc", "adminlevel=operator"])


def _add(ctl: int, sacctmgr: str, words: list[str]) -> None:
    try:
        run(ctl, [sacctmgr, "--immediate", "add", *words])
    except LabError as err:
        if "Nothing new added" not in str(err) and "already exists" not in str(err):
            raise


def _wait_for_nodes(ctl: int, record: Record, prefix: str, *, report: bool) -> None:
    """Wait until every node has registered with slurmctld; report drained nodes, but do not change them."""
    states: dict[str, str] = {}
    sinfo = [f"{prefix}/bin/sinfo", "--noheader", "--Node", "--format=%N %T"]
    with step("waiting for the nodes to register") if report else nullcontext():
        for _ in deadline(_NODES_READY_TIMEOUT_S):
            try:
                lines = run(ctl, sinfo).splitlines()
            except LabError as err:
                if record.controllers == 1:
                    raise
                states = {"sinfo": str(err)}  # the primary slurmctld takes over from its backup
                continue
            states = dict(line.split() for line in lines)
            if set(record.node_names) <= states.keys() and not any(map(_unheard, states.values())):
                break
        else:
            raise LabError(f"nodes did not register with slurmctld: {states}; see: vlab logs n1 slurmd")
    for name, state in sorted(states.items()):
        if state.startswith("drain"):
            hint = f"vlab exec ctl -- scontrol update nodename={name} state=resume"
            say(f"{name} is {state}; for the reason: vlab exec login -- sinfo -R; to resume it: {hint}")


def _unheard(state: str) -> bool:
    return state.endswith("*") or state.startswith(("unk", "down", "future"))
