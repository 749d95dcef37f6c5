# SPDX-License-Identifier: Apache-2.0
"""`vlab up`, `deploy` and `down`: start a cluster from any state, update it, and remove it."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from pathlib import Path

from vlablib import cgroups, services
from vlablib.cluster import configure, make_shared_folders
from vlablib.deploy import Deployment, deploy
from vlablib.hosts import end, remove_files, run, start_host, start_lab
from vlablib.machine import Machine, real_kvm
from vlablib.recipe import DEFAULT_SUITE, SUITES
from vlablib.report import LabError, say, step
from vlablib.rootfs import acquire
from vlablib.running import find
from vlablib.services import FABRIC_UNITS, UNITS, units_of
from vlablib.settings import MAX_NODES, USERS, Lab, Record, deadline

_DEFAULT_NODES = 2
_NODES_READY_TIMEOUT_S = 60
_ACCOUNT = "users"
# vhpcd's user, which requeues lost jobs
_OPERATOR = "vhpc"


def up(lab: Lab, suite: str | None, nodes: int | None, *, fabric: bool | None) -> None:
    """Start the lab, or its missing parts.

    Args:
        lab: its folders.
        suite: Debian suite; None: that of the running lab, otherwise the default.
        nodes: number of compute nodes; None: that of the running lab, otherwise 2.
        fabric: whether there is a simulated fabric; None: as in the running lab, otherwise no.

    Raises:
        LabError: the lab runs another suite, or a part does not start.
    """
    if nodes is not None and not 1 <= nodes <= MAX_NODES:
        raise LabError(f"--nodes {nodes}: must be between 1 and {MAX_NODES}")
    with lab.locked():
        record = _start(lab, suite, nodes, fabric=fabric)
        make_shared_folders(lab)
        deployment = deploy(lab, record)
        pids = _start_hosts(lab, record)
        _bring_in_line(lab, record, pids, deployment.stale)
    _complain(deployment)
    trial = f"lab/vlab exec -u alice login -- srun -N{record.nodes} hostname"
    say(f"{record.suite}, {record.nodes} nodes: ready. Try: {trial}")


def redeploy(lab: Lab) -> None:
    """Install the checkout into the running lab and restart the daemons that ran old files."""
    with lab.locked():
        record = Record.read(lab)
        pids = find(lab)
        if record is None or not set(record.hosts) <= pids.keys():
            raise LabError("the lab is not completely up; run: vlab up")
        deployment = deploy(lab, record)
        _bring_in_line(lab, record, pids, deployment.stale)
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
        _bring_in_line(lab, record, _start_hosts(lab, record), set(), rebooted=host)


def down(lab: Lab) -> None:
    """End the lab and remove all of it except the cached trees."""
    with lab.locked():
        _end_all(lab)
        remove_files(lab)


def _complain(deployment: Deployment) -> None:
    """Raise an error for parts that could not be built, after the hosts have been updated."""
    if deployment.failures:
        reasons = "\n".join(deployment.failures)
        raise LabError(f"the hosts run, but with the previously installed files, if any:\n{reasons}")


def _start(lab: Lab, suite: str | None, nodes: int | None, *, fabric: bool | None) -> Record:
    """Start the lab's own PID 1 if necessary, and write the record."""
    pids = find(lab)
    old = Record.read(lab)
    if "lab" in pids and old is not None:
        if suite is not None and suite != old.suite:
            raise LabError(f"the lab runs {old.suite}; for {suite}, first run: vlab down")
        chosen_fabric = old.fabric if fabric is None else fabric
        record = Record(old.suite, nodes or old.nodes, old.rootfs, chosen_fabric)
        record.write(lab)
        if not Path(old.rootfs).name.endswith(SUITES[old.suite].digest()):
            say("the recipe of the hosts' system has changed; run `vlab down` and `vlab up` to use it")
        for name in set(old.hosts) - set(record.hosts):
            _drop_host(lab, name, pids)
        return record
    _end_all(lab)
    if not real_kvm():
        say("no hardware virtualization here: guests will run in software (TCG)")
    chosen = SUITES[suite or DEFAULT_SUITE]
    tree, fd = acquire(lab.cache, chosen)
    # disks of a lab that was interrupted; homes, scratch and the catalogue are kept until `down`
    shutil.rmtree(lab.data / "hosts", ignore_errors=True)
    record = Record(chosen.name, nodes or _DEFAULT_NODES, str(tree), bool(fabric))
    record.write(lab)
    start_lab(lab, fd)
    os.close(fd)
    return record


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
        for unit in units_of(host, fabric=True):
            if unit.name in changed or (unit.name in FABRIC_UNITS and not record.fabric):
                services.stop(host, pids[host], unit)
    package = lab.deployed / "python"
    if any(package.iterdir()):
        _compile(pids["ctl"])
    present = [
        (host, pids[host], unit)
        for host in record.hosts
        for unit in units_of(host, fabric=record.fabric)
        if services.installed(unit, package)
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
    _start_accounting(pids["ctl"])
    started = [services.start(init, unit, rebooted=host == rebooted) for host, init, unit in present]
    for host, init, unit in present:
        services.wait_ready(host, init, unit)
    _wait_for_nodes(pids["ctl"], record, report=any(started))


def _compile(ctl: int) -> None:
    """Write bytecode for the hooks, which start often, and not always as a user who may write it."""
    script = "exec /opt/vhpc/bin/python -m compileall -q /opt/vhpc/lib/python3.*/site-packages/vhpc_slurm"
    run(ctl, ["sh", "-c", script])


def _start_accounting(ctl: int) -> None:
    database, accounting = UNITS["mariadbd"], UNITS["slurmdbd"]
    services.wait_ready("ctl", ctl, database)
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
            services.wait_ready("ctl", ctl, accounting)
    known = run(ctl, ["sacctmgr", "--noheader", "--parsable2", "list", "associations", "format=user"]).split()
    if not all(user.name in known for user in USERS):
        names = ",".join(user.name for user in USERS)
        _add(ctl, ["cluster", "vhpc"])
        _add(ctl, ["account", _ACCOUNT, "cluster=vhpc", "Description=lab", "Organization=lab"])
        _add(ctl, ["user", names, f"account={_ACCOUNT}", "cluster=vhpc"])
    if _OPERATOR not in known:
        _add(ctl, ["user", _OPERATOR, f"account={_ACCOUNT}", "cluster=vhpc", "adminlevel=operator"])


def _add(ctl: int, words: list[str]) -> None:
    try:
        run(ctl, ["sacctmgr", "--immediate", "add", *words])
    except LabError as err:
        if "Nothing new added" not in str(err) and "already exists" not in str(err):
            raise


def _wait_for_nodes(ctl: int, record: Record, *, report: bool) -> None:
    """Wait until every node has registered with slurmctld; report drained nodes, but do not change them."""
    states: dict[str, str] = {}
    with step("waiting for the nodes to register") if report else nullcontext():
        for _ in deadline(_NODES_READY_TIMEOUT_S):
            lines = run(ctl, ["sinfo", "--noheader", "--Node", "--format=%N %T"]).splitlines()
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
