# SPDX-License-Identifier: Apache-2.0
"""Slurm's settings, compared with what vhpc needs.

slurm.conf(5) and prolog_epilog.html of Slurm's documentation describe each
setting; what happens without it was observed on 22.05, 24.11 and 26.05.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from vhpc_slurm.cli.host.checks import CheckResult, error, ok, warn
from vhpc_slurm.cli.host.checks.boottime import NodeSize, boot_budget_s
from vhpc_slurm.config import Config
from vhpc_slurm.errors import FabricError
from vhpc_slurm.slurm.port import Slurm, SlurmPartition
from vhpc_slurm.slurm.settings import SlurmSettings

OLDEST = (22, 5)
BATCH_START_S = 900
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_KILLS = re.compile(r"^[^#\n]*\b(?:pkill|killall|skill|slay|(?:kill|terminate)-user)\b", re.M)
"""A line of a script that ends processes of a user."""
_ASKS = re.compile(r"^[^#\n]*\bsqueue\b", re.M)
_USER = re.compile(r"^(.*)\((\d+)\)$")
_USERS_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - folders of guests


def check(
    settings: SlurmSettings, config: Config, nodes: Sequence[NodeSize] = (NodeSize(),)
) -> Iterator[CheckResult]:
    """Results for settings of the whole cluster; ``nodes`` are the sizes of its nodes."""
    budget = max(boot_budget_s(config, node) for node in nodes)
    yield _version(settings)
    yield _prolog_flags(settings)
    yield _batch_start(settings, budget)
    yield from _script_timeouts(settings, config, budget)
    yield _interactive_step(settings)
    yield _memory(settings)
    yield _preemption(settings)
    yield _mpi(settings)
    yield from _shrinking(settings, config)
    yield _slurm_user(settings, config)
    yield from _backups(settings, config)
    yield from hooks(settings, config)
    yield from other_epilogs(settings, config)
    yield from _health_check(settings, config)


def _version(settings: SlurmSettings) -> CheckResult:
    text = settings.first("SLURM_VERSION")
    match = re.match(r"^(\d+)\.(\d+)", text)
    if match is None:
        return warn(
            "slurm.version", f"Slurm's version is not recognized: {text!r}", "see: scontrol show config"
        )
    if (int(match[1]), int(match[2])) < OLDEST:
        return error("slurm.version", f"Slurm {text} is too old", "install Slurm 22.05 or newer")
    return ok("slurm.version", f"Slurm {text}")


def _prolog_flags(settings: SlurmSettings) -> CheckResult:
    name, flags = "slurm.PrologFlags", settings.words("PrologFlags")
    absent = [flag for flag in ("Alloc", "Contain", "DeferBatch") if flag.lower() not in flags]
    if "runinjob" in flags:
        return error(
            name,
            "PrologFlags has RunInJob: when the extern step is killed, no Epilog ends the guests",
            "remove RunInJob",
        )
    if absent:
        return error(
            name,
            f"PrologFlags lacks {', '.join(absent)}: guests would not be booted on all nodes before the job",
            "PrologFlags=Alloc,Contain,DeferBatch",
        )
    return ok(name, f"PrologFlags={settings.first('PrologFlags')}")


def _backups(settings: SlurmSettings, config: Config) -> Iterator[CheckResult]:
    """With a backup of slurmctld: whether its hooks reach vhpcd, and what is lost with vhpcd's host."""
    name, hosts = "slurm.SlurmctldHost", settings.control_hosts
    if len(hosts) < 2:
        return
    own = config.controller.hosts
    if local := [host for host in own if host in LOCAL_HOSTS]:
        yield error(
            name,
            f"slurmctld has the backup {hosts[1]}, whose hooks would look for vhpcd on their own host",
            f"controller.host and backup_hosts = the names of vhpcd's hosts, instead of {local[0]!r}",
        )
    elif len(own) < 2:
        yield warn(
            name,
            f"slurmctld has the backup {hosts[1]}, vhpcd has none: without {own[0]} running jobs go on, and "
            "jobs with guests that start are requeued",
            "set controller.backup_hosts; see docs/install.md, several controllers",
        )
    else:
        yield ok(name, f"slurmctld has {len(hosts)} hosts, vhpcd {', '.join(own)}")


def _batch_start(settings: SlurmSettings, budget: int) -> CheckResult:
    name = "slurm.BatchStartTimeout"
    seconds = settings.seconds("BatchStartTimeout")
    if seconds is None or seconds >= max(BATCH_START_S, budget):
        return ok(name, f"BatchStartTimeout={seconds or 'infinite'}")
    what = (
        f"BatchStartTimeout={seconds}: Slurm gives up a job when slurmd registers after that time of its boot"
    )
    hint = f"BatchStartTimeout={max(BATCH_START_S, budget)}"
    return error(name, what, hint) if seconds < budget else warn(name, what, hint)


def _script_timeouts(settings: SlurmSettings, config: Config, budget: int) -> Iterator[CheckResult]:
    """Slurm 25.05 and newer have a timeout for each; older versions have one for both."""
    for key, needed in (("PrologTimeout", budget), ("EpilogTimeout", config.guests.stage_timeout_s)):
        used = key if settings.first(key) else "PrologEpilogTimeout"
        if used != key and key == "EpilogTimeout":
            continue
        name, seconds = f"slurm.{used}", settings.seconds(used)
        if seconds is None or seconds == 0:
            yield warn(
                name,
                f"{used} has no limit: a script that hangs blocks its node forever",
                f"{used}={max(300, budget)}",
            )
        elif seconds < needed:
            yield error(
                name,
                f"{used}={seconds} is shorter than a boot may take ({needed} s): Slurm then drains the node",
                f"{used}={max(300, needed)}, or lower guests.boot_timeout_s and guests.boot_timeout_max_s",
            )
        else:
            yield ok(name, f"{used}={seconds}")


def _interactive_step(settings: SlurmSettings) -> CheckResult:
    name, words = "slurm.LaunchParameters", settings.words("LaunchParameters")
    if "test_exec" in words:
        return warn(
            name,
            "LaunchParameters has test_exec: srun refuses programs that only images have",
            "remove test_exec",
        )
    if "use_interactive_step" in words:
        return ok(name, f"LaunchParameters={settings.first('LaunchParameters')}")
    return warn(
        name,
        "LaunchParameters lacks use_interactive_step: the shell of salloc runs outside of the guest",
        "LaunchParameters=use_interactive_step",
    )


def _memory(settings: SlurmSettings) -> CheckResult:
    name, value = "slurm.SelectTypeParameters", settings.first("SelectTypeParameters")
    if value.upper().endswith("MEMORY") or "_MEMORY" in value.upper():
        return ok(name, f"SelectTypeParameters={value}")
    return error(
        name,
        f"SelectTypeParameters={value or '(none)'}: Slurm allocates no memory, so guests have no size",
        "SelectTypeParameters=CR_Core_Memory",
    )


def _preemption(settings: SlurmSettings) -> CheckResult:
    name = "slurm.PreemptMode"
    bad = settings.words("PreemptMode") & {"suspend", "gang"}
    if bad:
        return warn(
            name,
            f"PreemptMode has {', '.join(sorted(bad))}: a suspended job's guests keep all of their memory",
            "PreemptMode=REQUEUE or CANCEL for partitions with guests",
        )
    return ok(name, f"PreemptMode={settings.first('PreemptMode') or 'OFF'}")


def _mpi(settings: SlurmSettings) -> CheckResult:
    name, value = "slurm.MpiDefault", settings.first("MpiDefault") or "none"
    security = re.search(r"PMIX_MCA_psec=([^;]*)", settings.first("PMIxEnv"))
    if security is not None and "native" not in security[1].split(","):
        return warn(
            name,
            f"PMIxEnv of mpi.conf has {security[0]}: PMIx in guests can only use native, so MPI programs of "
            "srun --mpi=pmix fail there",
            "add native to the list",
        )
    if settings.first("PMIxShareServerTopology").lower() in ("yes", "true"):
        return warn(
            name,
            "PMIxShareServerTopology of mpi.conf is on: MPI programs in guests bind themselves to the node's "
            "processors instead of the guest's",
            "PMIxShareServerTopology=false",
        )
    folder = settings.first("PMIxCliTmpDirBase").replace("(null)", "") or settings.first("TmpFS")
    if folder and folder.rstrip("/") not in _USERS_FOLDERS:
        return warn(
            name,
            f"MPI programs of srun --mpi=pmix create their session directories in {folder}, in guests too",
            "make sure that images have this folder and that users may write there, or set "
            "PMIxCliTmpDirBase=/tmp in mpi.conf",
        )
    return ok(name, f"MpiDefault={value}")


def _shrinking(settings: SlurmSettings, config: Config) -> Iterator[CheckResult]:
    """Ports with fixed GUIDs keep the job's key until the job ends, also on nodes that left it."""
    if not config.fabric.port_map:
        return
    name = "slurm.SchedulerParameters"
    if "disable_job_shrink" in settings.words("SchedulerParameters"):
        yield ok(name, "SchedulerParameters has disable_job_shrink")
        return
    yield error(
        name,
        "users can make running jobs smaller, and with fabric.port_map the adapter of a released node "
        "keeps the key of the job until the job ends",
        "SchedulerParameters=disable_job_shrink",
    )


def _slurm_user(settings: SlurmSettings, config: Config) -> CheckResult:
    name, text = "slurm.SlurmUser", settings.first("SlurmUser")
    match = _USER.match(text)
    user = match[1] if match else text
    if user not in (config.controller.slurm_user, "root"):
        return error(
            name,
            f"SlurmUser is {user}, but controller.slurm_user is {config.controller.slurm_user}: "
            "vhpcd rejects requests of slurmctld's hooks",
            f'slurm_user = "{user}" under [controller] of vhpc.toml',
        )
    return ok(name, f"SlurmUser={user}")


def operator(slurm: Slurm, settings: SlurmSettings, config: Config) -> CheckResult:
    """Whether vhpcd may requeue jobs of other users, which it must after a crash of slurmctld."""
    name, user = "slurm.operator", config.controller.user
    match = _USER.match(settings.first("SlurmUser"))
    if user in ("root", match[1] if match else settings.first("SlurmUser")):
        return ok(name, f"vhpcd runs as {user}, who may requeue jobs")
    hidden = "jobs" in settings.words("PrivateData")
    what = f"vhpcd's user {user} is not an operator of Slurm: jobs that were lost in a crash are not " + (
        "found, because PrivateData hides them" if hidden else "requeued"
    )
    hint = f"sacctmgr add user {user} account=… adminlevel=operator, or user = SlurmUser under [controller]"
    try:
        level = slurm.admin_level(user)
    except FabricError as err:
        return warn(name, err.line(), hint)
    if level.startswith(("Oper", "Admin")):
        return ok(name, f"{user} is {level}")
    return error(name, what, hint) if hidden else warn(name, what, hint)


def hooks(settings: SlurmSettings, config: Config) -> Iterator[CheckResult]:
    """Whether Slurm runs the hooks of vhpc."""
    for key, file in (
        ("Prolog", "prolog"),
        ("Epilog", "epilog"),
        ("PrologSlurmctld", "prolog-slurmctld"),
        ("EpilogSlurmctld", "epilog-slurmctld"),
    ):
        ours, values = f"{config.paths.libexec}/{file}", settings.values.get(key, ())
        if not values:
            yield error(f"slurm.{key}", f"{key} is not set: guests are not started or ended", f"{key}={ours}")
        elif not _names(values, ours):
            yield warn(
                f"slurm.{key}",
                f"{key}={','.join(values)} is not {ours}",
                f"{key}={ours}, or make sure that your script runs it and returns its exit status",
            )
        else:
            yield ok(f"slurm.{key}", f"{key}={','.join(values)}")


def other_epilogs(settings: SlurmSettings, config: Config) -> Iterator[CheckResult]:
    """Epilogs of the site on this host that end processes of a user, also those of the user's guests."""
    name, ours, after = "slurm.Epilog", f"{config.paths.libexec}/epilog", False
    for path in _paths(settings.values.get("Epilog", ())):
        if _is(path, ours):
            after = True
            continue
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        kill = _KILLS.search(text)
        if kill is None:
            continue
        called = text.find(ours)
        if not after and not 0 <= called < kill.end():
            yield warn(
                name,
                f"{path} ends processes of the job's user before the Epilog of vhpc has ended the guests",
                f"let {ours} run first",
            )
        if not _ASKS.search(text):
            yield warn(
                name,
                f"{path} ends processes of a user and asks squeue for no other job: guests of the user's "
                "other jobs on the node end too",
                "do that only after the user's last job on the node",
            )


def _paths(values: tuple[str, ...]) -> list[str]:
    """Paths of scripts that are given by path or pattern, in the order in which Slurm runs them."""
    return [path for value in values for path in sorted(glob.glob(value)) or [value]]  # noqa: PTH207 - of any folder


def _is(path: str, ours: str) -> bool:
    return path == ours or os.path.realpath(path) == os.path.realpath(ours)


def _names(values: tuple[str, ...], ours: str) -> bool:
    """Whether the hook of vhpc is among scripts given by path or pattern, directly or through a link."""
    return any(_is(path, ours) for path in _paths(values))


def _health_check(settings: SlurmSettings, config: Config) -> Iterator[CheckResult]:
    name, ours = "slurm.HealthCheckProgram", f"{config.paths.libexec}/healthcheck"
    hint = f"HealthCheckProgram={ours}, HealthCheckInterval=120, HealthCheckNodeState=ANY,CYCLE"
    values = settings.values.get("HealthCheckProgram", ())
    if not values:
        yield warn(name, "HealthCheckProgram is not set: what a crash leaves on a node is not removed", hint)
    elif not _names(values, ours):
        yield warn(
            name, f"HealthCheckProgram={values[0]} is not {ours}", f"{hint}, or run it from your program"
        )
    elif not settings.seconds("HealthCheckInterval"):
        yield warn(name, "HealthCheckInterval=0: the health check runs only when slurmd starts", hint)
    else:
        yield ok(name, f"HealthCheckProgram={values[0]}, every {settings.seconds('HealthCheckInterval')} s")


def partitions(found: Sequence[SlurmPartition]) -> Iterator[CheckResult]:
    """Partitions whose own PreemptMode suspends jobs."""
    for partition in found:
        if {"SUSPEND", "GANG"} & set(partition.preempt_mode.upper().split(",")):
            yield warn(
                "slurm.PreemptMode",
                f"partition {partition.name} has PreemptMode={partition.preempt_mode}: "
                "a suspended job's guests keep all of their memory",
                "PreemptMode=REQUEUE or CANCEL there",
            )


def executable_hooks(config: Config, files: tuple[str, ...]) -> Iterator[CheckResult]:
    """Whether the hooks that this host runs exist and are executable."""
    for file in files:
        path = Path(config.paths.libexec) / file
        name = f"hooks.{file}"
        if not path.is_file():
            yield error(name, f"{path} does not exist", "install vhpc on this host")
        elif not os.access(path, os.X_OK):
            yield error(name, f"{path} is not executable", f"chmod 755 {path}")
        else:
            yield ok(name, f"{path} is executable")
